# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Error functions, to the precision of the type, from f16 to f64; and ops that PyTorch takes apart
itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition, from_pytorch
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


def zero_tensor(size: list[int], **options: Any) -> Tensor:
    """``aten._efficientzerotensor`` as a tensor of zeros."""
    return torch.zeros(size, dtype=options.get("dtype"), device=options.get("device"))


ENTRIES = (
    Decomposition(aten.erf.default, erf, "IREE has no such function in f64"),
    Decomposition(aten._efficientzerotensor.default, zero_tensor, "a tensor with no memory is one in eager alone"),
    Decomposition(aten.erfc.default, erfc, NO_LOWERING),
    *(
        Decomposition(op, from_pytorch(op), NO_LOWERING)
        for op in (
            aten.addmv.default,
            aten.dist.default,
            aten.narrow_copy.default,
        )
    ),
)
