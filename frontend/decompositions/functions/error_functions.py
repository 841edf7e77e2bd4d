# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Error functions and their inverses, to the precision of the type, from f16 to f64; and ops that PyTorch takes apart
itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._ops import OpOverload

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition
from retrograd.frontend.decompositions.functions.chebyshev import evaluate, fit, in_full

aten = torch.ops.aten


def _erfcx_exponent(t: Tensor) -> Tensor:
    z = 2 / t - 2
    scaled = torch.special.erfcx(z) / t
    return torch.log(scaled)


# erfcx(z) = t exp(P(t)) with t = 2 / (2 + z), for z >= 0: P is smooth on (0, 1].
_ERFCX = fit(lambda s: _erfcx_exponent((s + 1) / 2), 40)


def _erfcx_of_positive(z: Tensor) -> Tensor:
    t = 2 / (2 + z)
    return t * torch.exp(evaluate(_ERFCX, 2 * t - 1))


@in_full
def erfc(x: Tensor) -> Tensor:
    """``aten.erfc``: accurate far out too, where 1 - erf(x) has no digits left."""
    z = x.abs()
    upper = torch.exp(-z * z) * _erfcx_of_positive(z)
    upper = torch.where(z > 30, 0.0, upper)
    return torch.where(x >= 0, upper, 2 - upper)


@in_full
def erfcx(x: Tensor) -> Tensor:
    """``aten.special_erfcx``: exp(x * x) erfc(x)."""
    upper = _erfcx_of_positive(x.abs())
    return torch.where(x >= 0, upper, 2 * torch.exp(x * x) - upper)


def erf(x: Tensor) -> Any:
    """``aten.erf`` in f64; torch-mlir's own for the other types."""
    if x.dtype is not torch.float64:
        return NotImplemented
    # Around zero the series of erf(x) / x, since 1 - erfc(x) loses the small ones.
    near = x * evaluate(_ERF_NEAR, 2 * (x * x).clamp(max=1.0) - 1)
    return torch.where(x.abs() < 1, near, 1 - erfc(x))


def _over_root(function: Callable[[Tensor], Tensor], square: Tensor) -> Tensor:
    root = square.sqrt()
    return function(root) / root


_ERF_NEAR = fit(lambda s: _over_root(torch.erf, (s + 1) / 2), 28)


def _erfinv_ratio(w: Tensor) -> Tensor:
    x = torch.sqrt(-torch.expm1(-w))
    # Near 1, x itself has no digits: one step of Newton's method on log(erfc(y)).
    tail = torch.exp(-w)
    lower = tail / (1 + x)
    y = torch.erfinv(x.clamp(max=1 - 1e-15))
    for _ in range(4):
        scaled = torch.special.erfcx(y)
        y = y + (torch.log(scaled) - y * y - torch.log(lower)) * scaled * (math.sqrt(math.pi) / 2)
    return y / x


# erfinv(x) / x as a function of w = -log(1 - x * x), after Giles, *Approximating the erfinv function* (2011).
_INVERSE_NEAR = fit(lambda s: _erfinv_ratio((s + 1) * 3.125), 40)
_INVERSE_FAR = fit(lambda s: _erfinv_ratio((s * 2 + 4.5).square()), 40)


def _inverse(x: Tensor, w: Tensor) -> Tensor:
    """erfinv(x) where w = -log(1 - x * x)."""
    near = evaluate(_INVERSE_NEAR, w.clamp(max=6.25) / 3.125 - 1)
    far = evaluate(_INVERSE_FAR, (w.clamp(6.25, 42.25).sqrt() - 4.5) / 2)
    return x * torch.where(w < 6.25, near, far)


@in_full
def erfinv(x: Tensor) -> Tensor:
    """``aten.erfinv``: infinite at -1 and 1, NaN beyond."""
    value = _inverse(x, -torch.log((1 - x) * (1 + x)))
    value = torch.where(x.abs() == 1, x * math.inf, value)
    return torch.where(x.abs() > 1, math.nan, value)


@in_full
def ndtri(p: Tensor) -> Tensor:
    """``aten.special_ndtri``: the quantile of the normal distribution; infinite at 0 and 1, NaN outside."""
    value = math.sqrt(2) * _inverse(2 * p - 1, -torch.log(4 * p * (1 - p)))
    value = torch.where(p == 0, -math.inf, torch.where(p == 1, math.inf, value))
    return torch.where((p < 0) | (p > 1), math.nan, value)


def zero_tensor(size: list[int], **options: Any) -> Tensor:
    """``aten._efficientzerotensor`` as a tensor of zeros."""
    return torch.zeros(size, dtype=options.get("dtype"), device=options.get("device"))


def _from_pytorch(op: OpOverload) -> Callable[..., Any]:
    """PyTorch's own decomposition of ``op``, which torch-mlir's table leaves out."""
    function: Callable[..., Any] = get_decompositions([op])[op]
    return function


ENTRIES = (
    Decomposition(aten.erf.default, erf, "IREE has no such function in f64"),
    Decomposition(aten._efficientzerotensor.default, zero_tensor, "a tensor with no memory is one in eager alone"),
    *(
        Decomposition(op, function, NO_LOWERING)
        for op, function in (
            (aten.erfc.default, erfc),
            (aten.erfinv.default, erfinv),
            (aten.special_erfcx.default, erfcx),
            (aten.special_ndtri.default, ndtri),
        )
    ),
    *(
        Decomposition(op, _from_pytorch(op), NO_LOWERING)
        for op in (
            aten.addmv.default,
            aten.dist.default,
            aten.narrow_copy.default,
        )
    ),
)
