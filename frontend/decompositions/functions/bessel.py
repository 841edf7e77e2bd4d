# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Modified Bessel functions of the first kind, to the precision of the type, from f16 to f64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition
from retrograd.frontend.decompositions.functions.chebyshev import Series, evaluate, fit, in_full

aten = torch.ops.aten


def _far_bessel(function: Callable[[Tensor], Tensor], s: Tensor) -> Tensor:
    z = 16 / (s + 1)
    return function(z) * z.sqrt()


# exp(-x) I(x) on [0, 8], and times sqrt(x) as a function of 1 / x beyond; I1 over x, which is even.
_I0 = fit(lambda s: torch.special.i0e(4 * (s + 1)), 36), fit(lambda s: _far_bessel(torch.special.i0e, s), 30)
_I1 = (
    fit(lambda s: torch.special.i1e(4 * (s + 1)) / (4 * (s + 1)), 36),
    fit(lambda s: _far_bessel(torch.special.i1e, s), 30),
)


def _scaled_bessel(series: tuple[Series, Series], z: Tensor, near_factor: Tensor | float) -> Tensor:
    near = evaluate(series[0], z.clamp(max=8.0) / 4 - 1) * near_factor
    outside = z.clamp(min=8.0)
    far = evaluate(series[1], 16 / outside - 1) * torch.rsqrt(outside)
    return torch.where(z <= 8, near, far)


@in_full
def i0e(x: Tensor) -> Tensor:
    """``aten.special_i0e``: exp(-|x|) I0(x)."""
    return _scaled_bessel(_I0, x.abs(), 1.0)


@in_full
def i0(x: Tensor) -> Tensor:
    """``aten.i0``: the modified Bessel function of order 0."""
    return torch.exp(x.abs()) * _scaled_bessel(_I0, x.abs(), 1.0)


@in_full
def i1e(x: Tensor) -> Tensor:
    """``aten.special_i1e``: exp(-|x|) I1(x)."""
    z = x.abs()
    value = _scaled_bessel(_I1, z, z)
    return torch.where(x < 0, -value, value)


@in_full
def i1(x: Tensor) -> Tensor:
    """``aten.special_i1``: the modified Bessel function of order 1."""
    z = x.abs()
    value = torch.exp(z) * _scaled_bessel(_I1, z, z)
    return torch.where(x < 0, -value, value)


ENTRIES = tuple(
    Decomposition(op, function, NO_LOWERING)
    for op, function in (
        (aten.i0.default, i0),
        (aten.special_i0e.default, i0e),
        (aten.special_i1.default, i1),
        (aten.special_i1e.default, i1e),
    )
)
