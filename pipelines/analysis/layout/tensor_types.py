# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads shape, element type and bytes from a ``!torch.vtensor``. The bindings give types as text alone, of which a
graph of thousands of values has a few dozen: each is taken apart once."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from retrograd.dialects import ir

_VTENSOR = re.compile(r"!torch\.vtensor<\[([\d,?]*)\],\s*([\w!.]+(?:<\w+>)?)>")
_BITS = re.compile(r"(?:f|bf|si|ui|i)(\d+)")


class TensorType(NamedTuple):
    """Shape (``None`` for open sizes), element type as MLIR spells it, and bytes of an element."""

    shape: tuple[int | None, ...]
    element: str
    element_bytes: int

    @property
    def fixed_shape(self) -> tuple[int, ...] | None:
        """The shape, if all sizes are fixed."""
        return None if None in self.shape else tuple(n for n in self.shape if n is not None)


@lru_cache(maxsize=4096)
def parse_tensor_type(text: str) -> TensorType | None:
    """The type of that text; ``None`` for any other than a ``!torch.vtensor``."""
    match = _VTENSOR.fullmatch(text)
    if match is None:
        return None
    shape = tuple(None if n == "?" else int(n) for n in match[1].split(",") if n)
    return TensorType(shape, match[2], _count_bytes(match[2]))


def _count_bytes(element: str) -> int:
    bits = _BITS.match(element.removeprefix("complex<"))
    width = max(1, int(bits[1]) // 8) if bits else 1
    return width * 2 if element.startswith("complex<") else width


def tensor_shape(type_: ir.Type) -> tuple[int | None, ...] | None:
    """Shape of a ``!torch.vtensor``, with ``None`` for open sizes; ``None`` for any other type."""
    known = parse_tensor_type(str(type_))
    return None if known is None else known.shape


def fixed_shape(type_: ir.Type) -> tuple[int, ...] | None:
    """Shape of a ``!torch.vtensor`` all of whose sizes are fixed; ``None`` for any other type."""
    known = parse_tensor_type(str(type_))
    return None if known is None else known.fixed_shape


def element_type(type_: ir.Type) -> str:
    """Element type of a ``!torch.vtensor`` as MLIR spells it (``f32``, ``si64``, ``i1``); empty for any other type."""
    known = parse_tensor_type(str(type_))
    return "" if known is None else known.element


def element_bytes(type_: ir.Type) -> int:
    """Bytes of an element of a ``!torch.vtensor``; booleans (``i1``) take a byte each, as does what is no tensor."""
    known = parse_tensor_type(str(type_))
    return 1 if known is None else known.element_bytes
