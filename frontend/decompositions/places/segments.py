# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reductions of elements that a tensor says belong together: each place reduces the whole axis, masked to its own.

That is places times elements, which fuse with the reduction and are never in memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition

aten = torch.ops.aten

# Past this many, places times elements are too many.
MOST_PAIRS = 1 << 24

_NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}
_SHORT = {"amax": "max", "amin": "min"}


def index_reduce(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True) -> Any:
    """``aten.index_reduce``: ``source`` reduced into the slices of ``x`` that ``index`` (one axis) names."""
    if not x.dtype.is_floating_point or not _has_few_pairs(x, index.numel()):
        return NotImplemented
    if index.numel() == 0 or x.numel() == 0:
        return x.clone()
    scalar = x.dim() == 0
    x, source = (x.reshape(1), source.reshape(1)) if scalar else (x, source)
    rows = _into(
        x.movedim(dim, -1), index.reshape(-1), source.movedim(dim, -1), _SHORT.get(reduce, reduce), include_self
    )
    return rows.reshape(()) if scalar else rows.movedim(-1, dim).contiguous()


def scatter_reduce(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True) -> Any:
    """``aten.scatter_reduce``: each element of ``src`` reduced into the place along ``dim`` that ``index`` names."""
    if not x.dtype.is_floating_point or not _has_few_pairs(x, index.shape[dim] if index.dim() else 1):
        if dim >= 0:
            return NotImplemented
        return aten.scatter_reduce.two(x, dim + max(x.dim(), 1), index, src, reduce, include_self=include_self)
    if index.numel() == 0:
        return x.clone()
    if x.dim() == 0:
        row = scatter_reduce(x.reshape(1), 0, index.reshape(1), src.reshape(1), reduce, include_self=include_self)
        return row.reshape(())
    dim = dim % x.dim()
    index, src = (t.reshape(1) if t.dim() == 0 else t for t in (index, src))
    # An index may be smaller than both tensors: what lies beyond is left alone.
    region = x
    for axis, length in enumerate(index.shape):
        src = src.narrow(axis, 0, length)
        region = region if axis == dim else region.narrow(axis, 0, length)
    rows = _into(
        region.movedim(dim, -1), index.movedim(dim, -1), src.movedim(dim, -1), _SHORT.get(reduce, reduce), include_self
    ).movedim(-1, dim)
    for axis in range(x.dim()):
        if axis == dim or rows.shape[axis] == x.shape[axis]:
            continue
        # Around the axes done so far the rest of x is whole already.
        wider = x
        for later in range(axis + 1, x.dim()):
            wider = wider if later == dim else wider.narrow(later, 0, index.shape[later])
        rows = torch.cat([rows, wider.narrow(axis, index.shape[axis], x.shape[axis] - index.shape[axis])], axis)
    return rows.contiguous()


def _has_few_pairs(x: Tensor, elements: int) -> bool:
    """Whether sizes are fixed, and small enough for this form."""
    return all(isinstance(s, int) for s in (*x.shape, elements)) and x.numel() * max(elements, 1) <= MOST_PAIRS


def _into(x: Tensor, index: Tensor, source: Tensor, reduce: str, include_self: bool) -> Tensor:
    """``x [..., n]`` with ``source [..., k]`` reduced into its last axis at ``index [..., k]``."""
    here = index.unsqueeze(-2) == torch.arange(x.shape[-1], device=x.device).unsqueeze(-1)
    total = _along(torch.where(here, source.unsqueeze(-2), _NEUTRAL[reduce]), reduce, -1)
    count = here.to(x.dtype).sum(-1)
    if include_self:
        total = _combine(total, x, reduce)
    if reduce == "mean":
        total = total / (count + (1 if include_self else 0)).clamp(min=1)
    return torch.where(count > 0, total, x)


def _along(masked: Tensor, reduce: str, axis: int) -> Tensor:
    if reduce in ("max", "min"):
        return masked.amax(axis) if reduce == "max" else masked.amin(axis)
    return masked.prod(axis) if reduce == "prod" else masked.sum(axis)


def _combine(total: Tensor, other: Tensor | float, reduce: str) -> Tensor:
    if reduce in ("max", "min"):
        return total.clamp(min=other) if reduce == "max" else total.clamp(max=other)
    return total * other if reduce == "prod" else total + other


ENTRIES = (
    Decomposition(aten.index_reduce.default, index_reduce, NO_LOWERING),
    Decomposition(
        aten.scatter_reduce.two,
        scatter_reduce,
        "torch-mlir writes to the wrong axis, or aborts, where it is counted from the end; for scalars, too",
    ),
)
