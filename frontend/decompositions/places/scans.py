# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Running maxima, minima, products and log-sum-exps, as reductions over what comes before each element.

Element i reduces a row that is masked behind i: n * n elements, which fuse with the reduction and are never in memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition

aten = torch.ops.aten

# Past this length n * n elements are too many.
LONGEST = 4096


def cummax(x: Tensor, dim: int) -> Any:
    """``aten.cummax``: running maxima and the last place (int64) where each was met; NaN stays."""
    return _running_extreme(x, dim, highest=True)


def cummin(x: Tensor, dim: int) -> Any:
    """``aten.cummin``: running minima and the last place (int64) where each was met; NaN stays."""
    return _running_extreme(x, dim, highest=False)


def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """``aten.cumprod``: running products, in ``dtype``, or int64 for integers."""
    if _is_long(x, dim):
        return NotImplemented
    wanted = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    if x.dim() == 0 or x.numel() == 0:
        return x.to(wanted).clone()
    row = x.movedim(dim, -1).to(wanted)
    masked = torch.where(_not_later(row), row.unsqueeze(-2), 1)
    # A product along an axis is one of few reductions that torch-mlir lacks: by halves.
    while masked.shape[-1] > 1:
        length = masked.shape[-1]
        half = length // 2
        product = masked[..., :half] * masked[..., half : 2 * half]
        masked = torch.cat([product, masked[..., 2 * half :]], -1) if length % 2 else product
    return masked.squeeze(-1).movedim(-1, dim).contiguous()


def logcumsumexp(x: Tensor, dim: int) -> Any:
    """``aten.logcumsumexp``: the logarithm of running sums of exponentials, each from its own maximum."""
    if _is_long(x, dim) or not x.dtype.is_floating_point:
        return NotImplemented
    if x.dim() == 0 or x.numel() == 0:
        return x.clone()
    row = x.movedim(dim, -1)
    masked = torch.where(_not_later(row), row.unsqueeze(-2), -math.inf)
    highest = masked.amax(-1, keepdim=True)
    shift = torch.where(torch.isinf(highest), 0.0, highest)
    total = torch.exp(masked - shift).sum(-1)
    return (torch.log(total) + shift.squeeze(-1)).movedim(-1, dim).contiguous()


def _running_extreme(x: Tensor, dim: int, *, highest: bool) -> Any:
    if _is_long(x, dim) or not x.dtype.is_floating_point:
        return NotImplemented
    if x.dim() == 0 or x.numel() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    row = x.movedim(dim, -1)
    seen, nan = _not_later(row), torch.isnan(row)
    masked = torch.where(seen, row.unsqueeze(-2), -math.inf if highest else math.inf)
    best = masked.amax(-1) if highest else masked.amin(-1)
    spoilt = (seen & nan.unsqueeze(-2)).to(torch.int32).amax(-1) > 0
    # With a NaN among them it is the last NaN that counts, else the last element that equals the best.
    found = torch.where(spoilt.unsqueeze(-1), nan.unsqueeze(-2), row.unsqueeze(-2) == best.unsqueeze(-1))
    number = torch.arange(row.shape[-1], dtype=torch.int32, device=x.device)
    places = torch.where(seen & found, number, 0).amax(-1).to(torch.int64)
    values = torch.where(spoilt, math.nan, best)
    return values.movedim(-1, dim).contiguous(), places.movedim(-1, dim).contiguous()


def _not_later(row: Tensor) -> Tensor:
    """``[n, n]``: whether the second place is at or before the first."""
    number = torch.arange(row.shape[-1], device=row.device)
    return number <= number.unsqueeze(-1)


def _is_long(x: Tensor, dim: int) -> bool:
    length = x.shape[dim] if x.dim() else 1
    return not isinstance(length, int) or length > LONGEST


ENTRIES = (
    Decomposition(aten.cummax.default, cummax, NO_LOWERING),
    Decomposition(aten.cummin.default, cummin, NO_LOWERING),
    Decomposition(aten.cumprod.default, cumprod, "torch-mlir's lowering fails for floating-point rows"),
    Decomposition(
        aten.logcumsumexp.default, logcumsumexp, "torch-mlir's form overflows where an element is large, and gives inf"
    ),
)
