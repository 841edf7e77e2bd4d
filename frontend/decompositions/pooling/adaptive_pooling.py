# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Adaptive means: a given number of windows over each axis, of one element more or less where that does not divide.

Output ``o`` of ``n`` is taken from inputs ``floor(o m / n)`` to ``ceil((o + 1) m / n)``. Gradients are written from the
input's side, as for other pooling. Maxima are left to PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.convolutions.windows import along, repeat
from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.decompositions.sums import computed

aten = torch.ops.aten


def adaptive_avg_pool(x: Tensor, output_size: Sequence[int]) -> Any:
    """``aten._adaptive_avg_pool{2,3}d``: output ``o`` of ``n`` is the mean of inputs ``floor(o m / n)`` to ``ceil((o
    + 1) m / n)``.
    """
    rank = len(output_size)
    size = x.shape[x.dim() - rank :]
    if not _are_static(*size, *output_size):
        return NotImplemented
    y = computed(x)
    for axis, (length, target) in enumerate(zip(size, output_size, strict=True)):
        dim = axis - rank
        if length % target == 0:
            y = y.unflatten(dim, (target, length // target)).mean(dim)
        else:
            start, end = _adaptive_windows(length, target, x.device)
            counts = along((end - start).to(y.dtype), dim)
            y = _sum_ranges(y, dim, start, end, -(-length // target) + 1) / counts
    return y.to(x.dtype)


def adaptive_avg_pool_backward(rank: int, grad: Tensor, x: Tensor) -> Any:
    """``aten._adaptive_avg_pool{rank}d_backward``, for any two sizes; ``NotImplemented`` for symbolic ones."""
    size, out = x.shape[x.dim() - rank :], grad.shape[grad.dim() - rank :]
    y = computed(grad)
    for axis, (length, target) in enumerate(zip(size, out, strict=True)):
        dim = axis - rank
        if isinstance(target, int) and target == 1:
            y = (y / length).expand(*y.shape[:dim], length, *(y.shape[dim + 1 :] if dim != -1 else ()))
        elif not _are_static(length, target):
            return NotImplemented
        elif length % target == 0:
            y = repeat(y / (length // target), dim, length // target)
        else:
            start, end = _adaptive_windows(length, target, x.device)
            share = y / along((end - start).to(y.dtype), dim)
            y = _sum_ranges(share, dim, *_adaptive_windows(target, length, x.device), -(-target // length) + 1)
    return y.to(x.dtype)


def _adaptive_windows(length: int, target: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and past-the-last input of each of ``target`` windows over ``length``; with the two swapped, the outputs
    over an input.
    """
    o = torch.arange(target, device=device)
    start = torch.div(o * length, target, rounding_mode="floor")
    end = torch.div((o + 1) * length + target - 1, target, rounding_mode="floor")
    return start, end


def _sum_ranges(x: Tensor, dim: int, start: Tensor, end: Tensor, longest: int) -> Tensor:
    """Sums of ``x`` over ``start`` to ``end`` along ``dim``: a gather with one more axis, then a reduction over it."""
    position = start.unsqueeze(1) + torch.arange(longest, device=x.device)
    last = x.shape[dim] - 1
    taken = x.index_select(dim, position.clamp(max=last).flatten()).unflatten(dim, (start.shape[0], longest))
    valid = (position < end.unsqueeze(1)).reshape(start.shape[0], longest, *[1] * (-dim - 1))
    return torch.where(valid, taken, 0).sum(dim)


def _are_static(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


_WHOLE = "PyTorch's form gathers the windows of all axes at once, in twice the time"
_NONE = "neither PyTorch nor torch-mlir decomposes it"

ENTRIES = (
    Decomposition(aten._adaptive_avg_pool2d.default, adaptive_avg_pool, _WHOLE),
    Decomposition(aten._adaptive_avg_pool3d.default, adaptive_avg_pool, _WHOLE),
    Decomposition(aten._adaptive_avg_pool2d_backward.default, partial(adaptive_avg_pool_backward, 2), _NONE),
    Decomposition(aten._adaptive_avg_pool3d_backward.default, partial(adaptive_avg_pool_backward, 3), _NONE),
)
