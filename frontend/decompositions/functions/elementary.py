# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Elementary functions and signs, where IREE or torch-mlir has none for a type, or fewer digits than the type."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition
from retrograd.frontend.decompositions.functions.chebyshev import evaluate, fit, in_full

aten = torch.ops.aten

_HALF_PI = Fraction("1.57079632679489661923132169163975144209858469968755")


def _split(value: Fraction, bits: int, parts: int) -> tuple[float, ...]:
    """``value`` in [1, 2) as a sum of numbers of ``bits`` bits each, and of a last one of f64's precision."""
    found = []
    for part in range(1, parts + 1):
        unit = Fraction(1, 2 ** (bits * part - 1))
        found.append(float(value // unit * unit))
        value -= Fraction(found[-1])
    return (*found, float(value))


# A multiple of a part is exact: of one of 8 bits in f32, and of 33 in f64, while the factor has 16 and 20.
_PARTS = {torch.float32: _split(_HALF_PI, 8, 4), torch.float64: _split(_HALF_PI, 33, 2)}
# Up to here the multiple of pi / 2 has 16 bits.
_REDUCED = 1e5


def _excess(square: Tensor) -> Tensor:
    root = square.sqrt()
    return (torch.tan(root) / root - 1) / square


_LIMIT = (math.pi / 4) ** 2
# (tan(z) / z - 1) / (z * z) as a function of z * z, for z in [-pi / 4, pi / 4].
_EXCESS = fit(lambda s: _excess((s + 1) * (_LIMIT / 2)), 16)


@in_full
def tan(x: Tensor) -> Tensor:
    """``aten.tan``: the multiple of pi / 2 is taken off in parts, and odd ones leave a negative cotangent.

    Arguments up to 1e5 in f32, and 1e6 in f64, are reduced exactly; beyond, in f32 sine and cosine are divided, which a
    CPU's have all digits there, and in f64 digits are lost.

    Source: W. J. Cody and W. Waite, *Software manual for the elementary functions* (1980), chapter 9.
    """
    turns = torch.round(x * (2 / math.pi))
    rest = x
    for part in _PARTS[x.dtype]:
        rest = rest - turns * part
    square = rest * rest
    value = rest + rest * (square * evaluate(_EXCESS, square * (2 / _LIMIT) - 1))
    odd = turns - 2 * torch.floor(turns / 2) == 1
    value = torch.where(odd, -1 / value, value)
    return torch.where(x.abs() > _REDUCED, torch.sin(x) / torch.cos(x), value) if x.dtype is torch.float32 else value


def hypot(x: Tensor, y: Tensor) -> Tensor:
    """``aten.hypot``, which neither overflows nor underflows before its result does."""
    long, short = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    ratio = torch.where(long == 0, 0.0, short / torch.where(long == 0, 1.0, long))
    value = long * torch.sqrt(1 + ratio * ratio)
    return torch.where(torch.isinf(x) | torch.isinf(y), math.inf, value)


def log10(x: Tensor) -> Any:
    """``aten.log10`` by the natural logarithm."""
    return torch.log(x) * (1 / math.log(10)) if x.dtype.is_floating_point else NotImplemented


def copysign(x: Tensor, y: Tensor) -> Any:
    """``aten.copysign``: the magnitude of ``x`` with the sign of ``y``, that of a negative zero too."""
    if not x.dtype.is_floating_point or not y.dtype.is_floating_point:
        return NotImplemented
    # A zero has a sign of its own, which its reciprocal shows.
    negative = torch.where(y == 0, 1 / y, y) < 0
    return torch.where(negative, -x.abs(), x.abs())


def copysign_scalar(x: Tensor, y: float) -> Any:
    """``aten.copysign`` with a number."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    return -x.abs() if math.copysign(1.0, y) < 0 else x.abs().clone()


def tanh(x: Tensor) -> Any:
    """``aten.tanh`` in f64; torch-mlir's own for the other types."""
    if x.dtype is not torch.float64:
        return NotImplemented
    z = x.abs()
    shrunk = torch.expm1(-2 * z)
    return torch.where(x < 0, shrunk, -shrunk) / (2 + shrunk)


def angle(x: Tensor) -> Any:
    """``aten.angle`` of real numbers: pi where negative, NaN stays."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    return torch.where(torch.isnan(x), x, torch.where(x < 0, math.pi, 0.0).to(x.dtype))


ENTRIES = (
    Decomposition(
        aten.tan.default,
        tan,
        "IREE's sine and cosine have an absolute error of 4e-7, which near a pole is all of the cosine",
    ),
    Decomposition(aten.tanh.default, tanh, "IREE has no such function in f64"),
    Decomposition(aten.log10.default, log10, "IREE's runtime has no function log10f"),
    Decomposition(aten.copysign.Tensor, copysign, "torch-mlir's form does not lower where shapes differ"),
    Decomposition(aten.copysign.Scalar, copysign_scalar, "torch-mlir's form does not lower where shapes differ"),
    Decomposition(aten.hypot.default, hypot, NO_LOWERING),
    Decomposition(aten.angle.default, angle, NO_LOWERING),
)
