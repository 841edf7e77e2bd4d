# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Hyperbolic functions and their inverses, where IREE takes differences that leave few digits, or squares that
overflow.

Their gradients are formulas of PyTorch's, which need none of this.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.decompositions.functions.chebyshev import in_full

aten = torch.ops.aten

# Beyond it sqrt(z * z + 1) is z in f64; and z * z is finite in f32.
_LARGE = 2.0**28


def expm1(x: Tensor) -> Any:
    """``aten.expm1`` in f64; IREE's own for the other types.

    Source: W. Kahan, in N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, section 1.14.1.
    """
    if x.dtype is not torch.float64:
        return NotImplemented
    power = torch.exp(x)
    # The rounding of the power is the same in its logarithm.
    logarithm = torch.log(power)
    near = torch.where(logarithm == 0, x, (power - 1) * (x / torch.where(logarithm == 0, 1.0, logarithm)))
    return torch.where(x.abs() < 1, near, power - 1)


@in_full
def sinh(x: Tensor) -> Tensor:
    """``aten.sinh`` by expm1, and beyond 20 by a square that overflows only where the result does."""
    z = x.abs()
    excess, root = torch.expm1(z), torch.exp(z / 2)
    value = torch.where(z > 20, root / 2 * root, (excess + excess / (excess + 1)) / 2)
    return torch.copysign(value, x)


@in_full
def asinh(x: Tensor) -> Tensor:
    """``aten.asinh`` of the magnitude, by log1p."""
    z = x.abs()
    value = torch.log1p(z + z * z / (1 + torch.sqrt(z * z + 1)))
    value = torch.where(z > _LARGE, torch.log(z) + math.log(2), value)
    return torch.copysign(value, x)


@in_full
def acosh(x: Tensor) -> Tensor:
    """``aten.acosh`` by log1p of what is above one."""
    above = x - 1
    value = torch.log1p(above + torch.sqrt(above * (above + 2)))
    value = torch.where(x > _LARGE, torch.log(x) + math.log(2), value)
    return torch.where(x < 1, math.nan, value)


@in_full
def atanh(x: Tensor) -> Tensor:
    """``aten.atanh`` of the magnitude, by log1p."""
    z = x.abs()
    value = torch.log1p(2 * z / (1 - z)) / 2
    return torch.copysign(value, x)


_NEAR_ZERO = "IREE's form is a difference that has no digit left near zero"

ENTRIES = (
    Decomposition(aten.expm1.default, expm1, f"in f64 {_NEAR_ZERO}"),
    Decomposition(aten.sinh.default, sinh, _NEAR_ZERO),
    Decomposition(aten.asinh.default, asinh, f"{_NEAR_ZERO}, and infinite below -4000"),
    Decomposition(aten.acosh.default, acosh, "IREE's form has no digit left near one, and is infinite from 2e19 on"),
    Decomposition(aten.atanh.default, atanh, _NEAR_ZERO),
)
