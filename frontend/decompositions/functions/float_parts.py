# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Mantissa, exponent and neighbours of floating-point numbers, by products with powers of two, which are exact.

torch-mlir has no view of a tensor's bits as those of another dtype.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition

aten = torch.ops.aten

# Binary digits of the mantissa, and the least exponent of a number that is not zero.
_DIGITS = {torch.float32: 24, torch.float64: 53}
_LEAST = {torch.float32: -149, torch.float64: -1074}
# Powers of two in the order of their use: a dtype holds each of them, and no two exponents are further apart than their
# sum.
_SHIFTS = {
    torch.float32: (64, 64, 64, 32, 16, 8, 4, 2, 1),
    torch.float64: (512, 512, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1),
}
_HALVES = (torch.bfloat16, torch.float16)


def frexp(x: Tensor) -> Any:
    """``aten.frexp``: mantissas from a half to 1, and exponents, int32; of 0, infinity and NaN these, and 0."""
    if x.dtype in _HALVES:
        mantissa, exponent = frexp(x.float())
        return mantissa.to(x.dtype), exponent
    if x.dtype not in _DIGITS:
        return NotImplemented
    size, exponent = x.abs(), torch.ones_like(x, dtype=torch.int32)
    for shift in _SHIFTS[x.dtype]:
        large = size >= 2.0**shift
        size = torch.where(large, size * 2.0**-shift, size)
        exponent = torch.where(large, exponent + shift, exponent)
    for shift in _SHIFTS[x.dtype]:
        small = size < 2.0 ** (1 - shift)
        size = torch.where(small, size * 2.0**shift, size)
        exponent = torch.where(small, exponent - shift, exponent)
    parts = (x != 0) & (x.abs() < math.inf)
    return torch.where(parts, torch.where(x < 0, -size, size) * 0.5, x), torch.where(parts, exponent, 0)


def nextafter(x: Tensor, other: Tensor) -> Any:
    """``aten.nextafter``: the number next to ``x`` on the side of ``other``; ``NotImplemented`` for half types."""
    if x.dtype not in _DIGITS or other.dtype != x.dtype:
        return NotImplemented
    x, other = torch.broadcast_tensors(x, other)
    mantissa, exponent = frexp(x)
    inward = (other > x) != (x > 0)
    exponent = exponent - _DIGITS[x.dtype] - (inward & (mantissa.abs() == 0.5)).to(torch.int32)
    step = _power_of_two(exponent.clamp(min=_LEAST[x.dtype]), x.dtype)
    moved = torch.where(other > x, x + step, x - step)
    # The neighbour of an infinity is the largest number, that of zero the least.
    moved = torch.where(x.abs() == math.inf, x.sign() * torch.finfo(x.dtype).max, moved)
    moved = torch.where(x == 0, other.sign() * 2.0 ** _LEAST[x.dtype], moved)
    return torch.where(x == other, other, torch.where((x != x) | (other != other), math.nan, moved))


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2**exponent, exactly, from the least exponent of ``dtype`` on."""
    above = exponent - _LEAST[dtype]
    power = torch.full_like(exponent, 2.0 ** _LEAST[dtype], dtype=dtype)
    for shift in _SHIFTS[dtype]:
        reached = above >= shift
        power = torch.where(reached, power * 2.0**shift, power)
        above = torch.where(reached, above - shift, above)
    return power


ENTRIES = (
    Decomposition(aten.frexp.Tensor, frexp, NO_LOWERING),
    Decomposition(aten.nextafter.default, nextafter, NO_LOWERING),
)
