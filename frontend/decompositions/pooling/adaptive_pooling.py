# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Adaptive pooling: a given number of windows over each axis, of one element more or less where that does not divide.

Output ``o`` of ``n`` is taken from inputs ``floor(o m / n)`` to ``ceil((o + 1) m / n)``. Gradients are written from the
input's side, as for other pooling.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from retrograd.frontend.decompositions.convolutions.windows import along, flat_positions, repeat
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


def adaptive_max_pool(pool: OpOverload, x: Tensor, output_size: Sequence[int]) -> Any:
    """``aten.adaptive_max_pool{2,3}d``: the largest of each window, and its place in the flattened plane (int64);
    ``NotImplemented`` for symbolic sizes. ``pool`` is the pooling by windows of one size, for where they are that.
    """
    rank = len(output_size)
    size = x.shape[x.dim() - rank :]
    if not _are_static(*size, *output_size):
        return NotImplemented
    even = [_even_window(length, target) for length, target in zip(size, output_size, strict=True)]
    if all(even):
        kernel, stride = zip(*(window for window in even if window), strict=True)
        return pool(x, kernel, stride)
    best, places, step = x, None, 1
    # The last axis first: of equal ones, the first of the plane's rows is taken, as in eager.
    for axis in reversed(range(rank)):
        dim, length = axis - rank, size[axis]
        start, end = _adaptive_windows(length, output_size[axis], x.device)
        best, at = _take_windows(best, dim, start, end).max(dim)
        own = (along(start, dim) + at) * step
        if places is not None:
            own = own + _take_windows(places, dim, start, end).gather(dim, at.unsqueeze(dim)).squeeze(dim)
        places, step = own, step * length
    return best, places


def adaptive_max_pool_backward(rank: int, grad: Tensor, x: Tensor, indices: Tensor) -> Any:
    """``aten.adaptive_max_pool{rank}d_backward``: ``indices`` are flat in the plane; ``NotImplemented`` for symbolic
    sizes.
    """
    size, out = x.shape[x.dim() - rank :], grad.shape[grad.dim() - rank :]
    if not _are_static(*size, *out):
        return NotImplemented
    own = flat_positions(size, x.device)
    ranges = [_adaptive_windows(target, length, x.device) for length, target in zip(size, out, strict=True)]
    most = [1 if length % target == 0 else -(-target // length) + 1 for length, target in zip(size, out, strict=True)]
    total: Tensor | None = None
    grads = computed(grad)
    for offsets in itertools.product(*map(range, most)):
        value, pick, valid = grads, indices, own >= 0
        for axis, offset in enumerate(offsets):
            start, end = ranges[axis]
            where = (start + offset).clamp(max=out[axis] - 1)
            dim = axis - rank
            value, pick = value.index_select(dim, where), pick.index_select(dim, where)
            valid = valid & along(start + offset < end, dim)
        part = torch.where((pick == own) & valid, value, 0)
        total = part if total is None else total + part
    assert total is not None, "every input has at least one window"
    return total.to(x.dtype)


def _adaptive_windows(length: int, target: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First and past-the-last input of each of ``target`` windows over ``length``; with the two swapped, the outputs
    over an input.
    """
    o = torch.arange(target, device=device)
    start = torch.div(o * length, target, rounding_mode="floor")
    end = torch.div((o + 1) * length + target - 1, target, rounding_mode="floor")
    return start, end


def _even_window(length: int, target: int) -> tuple[int, int] | None:
    """Size and step of ``target`` windows over ``length``, if these are the same for all."""
    starts = [o * length // target for o in range(target)]
    sizes = {-(-(o + 1) * length // target) - start for o, start in enumerate(starts)}
    steps = {b - a for a, b in pairwise(starts)} or {1}
    return (sizes.pop(), steps.pop()) if len(sizes) == len(steps) == 1 and 0 not in steps else None


def _take_windows(x: Tensor, dim: int, start: Tensor, end: Tensor) -> Tensor:
    """``x`` with ``dim`` (negative) made two, the windows and what is in them; a shorter window has its last element
    again."""
    targets, length = start.shape[0], x.shape[dim]
    offsets = torch.arange(min(-(-length // targets) + 1, length), device=x.device)
    inputs = torch.minimum(start.unsqueeze(1) + offsets, end.unsqueeze(1) - 1)
    return x.index_select(dim, inputs.flatten()).unflatten(dim, inputs.shape)


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
_ABORT = "torch-mlir's lowering ends the process"
_EVEN = "torch-mlir takes windows for equal; where they are not, the program fails when it runs"

ENTRIES = (
    Decomposition(aten._adaptive_avg_pool2d.default, adaptive_avg_pool, _WHOLE),
    Decomposition(aten._adaptive_avg_pool3d.default, adaptive_avg_pool, _WHOLE),
    Decomposition(aten._adaptive_avg_pool2d_backward.default, partial(adaptive_avg_pool_backward, 2), _NONE),
    Decomposition(aten._adaptive_avg_pool3d_backward.default, partial(adaptive_avg_pool_backward, 3), _NONE),
    Decomposition(
        aten.adaptive_max_pool2d.default, partial(adaptive_max_pool, aten.max_pool2d_with_indices.default), _EVEN
    ),
    Decomposition(
        aten.adaptive_max_pool3d.default, partial(adaptive_max_pool, aten.max_pool3d_with_indices.default), _EVEN
    ),
    Decomposition(aten.adaptive_max_pool2d_backward.default, partial(adaptive_max_pool_backward, 2), _ABORT),
    Decomposition(aten.adaptive_max_pool3d_backward.default, partial(adaptive_max_pool_backward, 3), _ABORT),
)
