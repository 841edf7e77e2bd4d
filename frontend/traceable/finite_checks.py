# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Branches that do nothing but clamp what is not finite to the largest number of its type:
``if not torch.isfinite(h).all(): h = torch.clamp(h, max=torch.finfo(h.dtype).max - 1000)``.

Models of half precision have them behind their layers. In a step that is of any use they are not taken, and where one
would be, what follows overflows again.
"""

from __future__ import annotations

import dis
from functools import cache
from types import CodeType

from retrograd.frontend.python.argument_functions import Noted

_ASKED = {("all", "isfinite"): True, ("any", "isinf"): False, ("any", "isnan"): False}
# What may be named in such a branch, beside local variables.
_CLAMP_NAMES = frozenset(("torch", "finfo", "dtype", "max", "min", "clamp", "clamp_"))
_ARITHMETIC = ("LOAD_", "BINARY_OP", "UNARY_", "CALL", "PRECALL", "KW_NAMES", "PUSH_NULL", "COPY", "SWAP", "STORE_FAST")


def find_finite(asked: Noted | None, code: CodeType, offset: int) -> bool | None:
    """The answer for finite numbers to the question that is asked at ``offset`` of a function's code, if that is
    whether a tensor is finite, and the branch for others only clamps; ``None`` where it is not."""
    if asked is None or len(asked.args) != 1 or asked.kwargs or not isinstance(asked.args[0], Noted):
        return None
    names = getattr(asked.func, "__name__", ""), getattr(asked.args[0].func, "__name__", "")
    answer = _ASKED.get(names)
    return answer if answer is not None and _only_clamps(code, offset, answer) else None


@cache
def _only_clamps(code: CodeType, offset: int, passing: bool) -> bool:
    """Whether what a function does by the other answer than ``passing``, and not by this one, is to clamp."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    places = {instruction.offset: place for place, instruction in enumerate(instructions)}
    if offset not in places:
        return False
    place = places[offset] + instructions[places[offset]].opname.startswith("CALL")
    jump = instructions[place]
    if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(f"IF_{str(passing).upper()}"):
        return False
    branch = instructions[place + 1 : places[jump.argval]]
    named = {i.argval for i in branch if i.opname in ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD")}
    return "finfo" in named and named <= _CLAMP_NAMES and all(i.opname.startswith(_ARITHMETIC) for i in branch)
