# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Checks in a model's code that raise: ``if labels.max() >= vocab: raise``, ``assert x.isfinite().all()``.

A trace does not know what is in a tensor, and goes on as if nothing were wrong. A check that is computed from arguments
alone, by a few functions element by element, is looked at before each call; others are taken for granted, and so are
those that clamp what is not finite.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode

from retrograd.frontend.python.argument_functions import WRITES, FunctionsOfArguments, Noted, Steps
from retrograd.frontend.python.source_locations import format_frame, is_user_file, user_frame

_QUESTIONS = (Tensor.__bool__, Tensor.item)
# PyTorch's own code that looks at parameters and samples of a distribution.
_DISTRIBUTIONS = str(Path(torch.distributions.__file__).parent)
# More functions than these are no check of an argument.
_MOST_STEPS = 16
_CHEAP_NAMES = """
    abs all amax amin any eq ge gt le lt ne max min sum isfinite isnan isinf neg numel logical_and logical_not
    logical_or bitwise_and bitwise_not bitwise_or add sub mul remainder __and__ __or__ __invert__ __eq__ __ne__ __lt__
    __le__ __gt__ __ge__ __add__ __sub__ __mul__ __mod__ __neg__ __rsub__ __getitem__ view reshape flatten squeeze
    unsqueeze select detach to long int float bool clone contiguous equal
"""
CHEAP = frozenset(_CHEAP_NAMES.split())


@dataclass(frozen=True)
class SanityCheck:
    """A check of the arguments, at ``place`` in the model's code. ``steps`` give ``passes`` where nothing is wrong;
    ``None`` where the check is taken for granted."""

    place: str
    passes: bool
    steps: Steps | None

    def __str__(self) -> str:
        return f"{' '.join(self.place.split())} ({'taken for granted' if self.steps is None else 'before each call'})"

    def holds(self, arguments: Sequence[Tensor]) -> bool:
        """Whether the model would go on with these tensors as arguments, as far as this check is about them."""
        return self.steps is None or bool(self.steps.run(arguments)) is self.passes


class CheckRecorder(TorchFunctionMode):
    """While it is active, checks that raise find nothing wrong; ``checks`` has them. ``arguments`` are the tensors that
    the model is called with; further out than a call of ``owner`` there is none of the model's code."""

    def __init__(self, arguments: Sequence[Tensor], owner: CodeType) -> None:
        super().__init__()
        self.checks: list[SanityCheck] = []
        self._owner = owner
        self.functions = FunctionsOfArguments(arguments)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS and len(args) == 1 and not kwargs:
            if self._is_coin_that_never_falls(args[0]):
                return False
            frame = user_frame(sys._getframe(1))
            asking = _asking_frame(sys._getframe(1))
            passes = (
                None
                if frame is None or asking is None or is_caught(frame, self._owner)
                else find_passing(asking.f_code, asking.f_lasti)
            )
            if frame is not None and passes is not None and (func is Tensor.__bool__ or args[0].dtype is torch.bool):
                self.checks.append(
                    SanityCheck(format_frame(frame), passes, self.functions.find(args[0], CHEAP, _MOST_STEPS))
                )
                return passes
            finite = self._find_finite(args[0], asking)
            if finite is not None and frame is not None:
                self.checks.append(SanityCheck(format_frame(frame), finite, None))
                return finite
        if func in WRITES:
            with self.functions.noting_write(func, args, kwargs):
                return func(*args, **kwargs)
        return self.functions.note(func(*args, **kwargs), func, args, kwargs)

    def _find_finite(self, asked: Tensor, asking: FrameType | None) -> bool | None:
        """The answer by which nothing is clamped; ``None`` where arguments alone say whether something is."""
        if asking is None or self.functions.find(asked, CHEAP, _MOST_STEPS) is not None:
            return None
        return find_finite(self.functions.function_of(asked), asking.f_code, asking.f_lasti)

    def _is_coin_that_never_falls(self, asked: Tensor) -> bool:
        """Whether it is ``torch.rand(...) < p`` of a ``p`` of zero, by which no layer is left out."""
        compared = self.functions.function_of(asked)
        if (
            compared is None
            or getattr(compared.func, "__name__", "") not in ("lt", "__lt__")
            or len(compared.args) != 2
        ):
            return False
        drawn, bound = compared.args
        never = isinstance(bound, int | float) and bound <= 0
        return never and getattr(drawn, "func", None) in (torch.rand, torch.rand_like)


def _asking_frame(frame: FrameType | None) -> FrameType | None:
    """The code that asks: the user's, or a distribution's that looks at its parameters or at a sample."""
    asking = frame
    while asking is not None and (
        asking.f_code.co_name == "__torch_function__" or asking.f_code is FunctionalTensor.__bool__.__code__
    ):
        asking = asking.f_back
    validates = (
        asking is not None
        and asking.f_code.co_filename.startswith(_DISTRIBUTIONS)
        and not _catches(asking.f_code, asking.f_lasti)
    )
    return asking if validates else user_frame(frame)


def is_caught(frame: FrameType | None, owner: CodeType) -> bool:
    """Whether what a function raises there may be caught within ``owner``: it would be no check then, but a branch."""
    while frame is not None and frame.f_code is not owner:
        if is_user_file(frame.f_code.co_filename) and _catches(frame.f_code, frame.f_lasti):
            return True
        frame = frame.f_back
    return False


@cache
def _catches(code: CodeType, offset: int) -> bool:
    """Whether code has an ``except`` around an offset that does not raise again, whatever it is for."""
    instructions = list(dis.get_instructions(code))
    places = {instruction.offset: place for place, instruction in enumerate(instructions)}
    entries: Any = dis.Bytecode(code)
    handlers = [e.target for e in entries.exception_entries if e.start <= offset < e.end]
    for handler in handlers:
        for instruction in instructions[places[handler] :]:
            if instruction.opname in ("WITH_EXCEPT_START", "RERAISE"):
                break
            if instruction.opname in ("POP_EXCEPT", "CHECK_EXC_MATCH", "CHECK_EG_MATCH"):
                return True
    return False


@cache
def find_passing(code: CodeType, offset: int) -> bool | None:
    """The answer to a question that is asked at ``offset`` of a function's code by which the function goes on, where it
    raises by the other; ``None`` where it raises by neither, or nothing is known."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    places = {instruction.offset: place for place, instruction in enumerate(instructions)}
    if offset not in places:
        return None
    place = _place_of_answer(instructions, places[offset])
    negated = instructions[place].opname == "UNARY_NOT"
    jump = instructions[place + negated]
    if "IF_TRUE" not in jump.opname and "IF_FALSE" not in jump.opname:
        return None
    jumps_by = "IF_TRUE" in jump.opname
    raises_there = _raises(instructions, places.get(jump.argval))
    raises_here = _raises(instructions, place + negated + 1)
    if raises_there == raises_here:
        return None
    passing = not jumps_by if raises_there else jumps_by
    return not passing if negated else passing


def _place_of_answer(instructions: Sequence[dis.Instruction], place: int) -> int:
    """Where code goes by the answer to what it asks at a place: there, or behind what asks in a step of its own, which
    comparisons and tests of any value are from Python 3.13 on."""
    place += instructions[place].opname.startswith(("CALL", "COMPARE_OP", "TO_BOOL"))
    return place + (instructions[place].opname == "TO_BOOL")


def _raises(instructions: Sequence[dis.Instruction], place: int | None) -> bool:
    """Whether a function does nothing from there but make an exception and raise it."""
    while place is not None and place < len(instructions):
        name = instructions[place].opname
        if name == "RAISE_VARARGS":
            return True
        if name.startswith(("RETURN", "POP_JUMP", "FOR_ITER", "STORE_ATTR", "STORE_SUBSCR", "JUMP", "YIELD")):
            return False
        place += 1
    return False


# -- Branches that clamp ----------------------------------------------------------------------------------------------

# Branches that do nothing but clamp what is not finite to the largest number of its type: ``if not
# torch.isfinite(h).all(): h = torch.clamp(h, max=torch.finfo(h.dtype).max - 1000)``. Models of half precision have
# them behind their layers. In a step that is of any use they are not taken, and where one would be, what follows
# overflows again.


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
    place = _place_of_answer(instructions, places[offset])
    jump = instructions[place]
    if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(f"IF_{str(passing).upper()}"):
        return False
    branch = instructions[place + 1 : places[jump.argval]]
    named = {i.argval for i in branch if i.opname in ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD")}
    return "finfo" in named and named <= _CLAMP_NAMES and all(i.opname.startswith(_ARITHMETIC) for i in branch)
