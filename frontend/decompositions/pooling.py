# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pooling: gradients written from the input's side.

Each input element asks the few outputs whose windows may cover it, instead of each output adding into its window: no
scatter, which IREE runs one element at a time, and none of its hazards with overlapping windows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.decompositions.windows import Window, spread_axes

aten = torch.ops.aten


def avg_pool_backward(
    rank: int,
    grad: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """``aten.avg_pool{rank}d_backward``: ``grad [..., *out]`` to ``[..., *spatial]``, of ``x``'s type."""
    window = Window.of(spread_axes(kernel_size, rank), stride, padding, [1])
    size = x.shape[x.dim() - rank :]
    share = _computed(grad)
    if divisor_override is not None:
        share = share / divisor_override
    elif ceil_mode or (any(padding) and not count_include_pad):
        for axis in range(rank):
            share = share / window_lengths(window.axis(axis), grad, axis - rank, size[axis], count_include_pad)
    else:
        share = share / math.prod(window.kernel)
    for axis in range(rank):
        share = _sum_of_covers(share, window.axis(axis), axis - rank, size[axis])
    return share.to(x.dtype)


def max_pool_backward(
    rank: int,
    grad: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """``aten.max_pool{rank}d_with_indices_backward``: an element takes the gradient of each output whose index names
    it.
    """
    window = Window.of(spread_axes(kernel_size, rank), stride, padding, dilation)
    size = x.shape[x.dim() - rank :]
    own = _flat_positions(size, x.device)
    # Four bytes compare twice as many at a time as eight, and no plane has 2^31 elements.
    grads, picks = _computed(grad), indices.to(torch.int32)
    total: Tensor | None = None
    for offsets in itertools.product(*(range(_covers(window.axis(axis))) for axis in range(rank))):
        value, pick = grads, picks
        for axis, offset in enumerate(offsets):
            value = _cover(value, window.axis(axis), axis - rank, size[axis], offset, 0)
            pick = _cover(pick, window.axis(axis), axis - rank, size[axis], offset, -1)
        part = torch.where(pick == own, value, 0)
        total = part if total is None else total + part
    assert total is not None, "a window has at least one tap"
    return total.to(x.dtype)


def adaptive_avg_pool(x: Tensor, output_size: Sequence[int]) -> Any:
    """``aten._adaptive_avg_pool{2,3}d``: output ``o`` of ``n`` is the mean of inputs ``floor(o m / n)`` to ``ceil((o
    + 1) m / n)``.
    """
    rank = len(output_size)
    size = x.shape[x.dim() - rank :]
    if not _are_static(*size, *output_size):
        return NotImplemented
    y = _computed(x)
    for axis, (length, target) in enumerate(zip(size, output_size, strict=True)):
        dim = axis - rank
        if length % target == 0:
            y = y.unflatten(dim, (target, length // target)).mean(dim)
        else:
            start, end = _adaptive_windows(length, target, x.device)
            counts = _along((end - start).to(y.dtype), dim)
            y = _sum_ranges(y, dim, start, end, -(-length // target) + 1) / counts
    return y.to(x.dtype)


def adaptive_avg_pool_backward(rank: int, grad: Tensor, x: Tensor) -> Any:
    """``aten._adaptive_avg_pool{rank}d_backward``, for any two sizes; ``NotImplemented`` for symbolic ones."""
    size, out = x.shape[x.dim() - rank :], grad.shape[grad.dim() - rank :]
    y = _computed(grad)
    for axis, (length, target) in enumerate(zip(size, out, strict=True)):
        dim = axis - rank
        if isinstance(target, int) and target == 1:
            y = (y / length).expand(*y.shape[:dim], length, *(y.shape[dim + 1 :] if dim != -1 else ()))
        elif not _are_static(length, target):
            return NotImplemented
        elif length % target == 0:
            y = _repeat(y / (length // target), dim, length // target)
        else:
            start, end = _adaptive_windows(length, target, x.device)
            share = y / _along((end - start).to(y.dtype), dim)
            y = _sum_ranges(share, dim, *_adaptive_windows(target, length, x.device), -(-target // length) + 1)
    return y.to(x.dtype)


def adaptive_max_pool_backward(rank: int, grad: Tensor, x: Tensor, indices: Tensor) -> Any:
    """``aten.adaptive_max_pool{rank}d_backward``: ``indices`` are flat in the plane; ``NotImplemented`` for symbolic
    sizes.
    """
    size, out = x.shape[x.dim() - rank :], grad.shape[grad.dim() - rank :]
    if not _are_static(*size, *out):
        return NotImplemented
    own = _flat_positions(size, x.device)
    ranges = [_adaptive_windows(target, length, x.device) for length, target in zip(size, out, strict=True)]
    most = [1 if length % target == 0 else -(-target // length) + 1 for length, target in zip(size, out, strict=True)]
    total: Tensor | None = None
    grads = _computed(grad)
    for offsets in itertools.product(*map(range, most)):
        value, pick, valid = grads, indices, own >= 0
        for axis, offset in enumerate(offsets):
            start, end = ranges[axis]
            where = (start + offset).clamp(max=out[axis] - 1)
            dim = axis - rank
            value, pick = value.index_select(dim, where), pick.index_select(dim, where)
            valid = valid & _along(start + offset < end, dim)
        part = torch.where((pick == own) & valid, value, 0)
        total = part if total is None else total + part
    assert total is not None, "every input has at least one window"
    return total.to(x.dtype)


def _covers(window: Window) -> int:
    """How many outputs in a row may have a window over the same element, along one axis."""
    reach = window.dilation[0] * (window.kernel[0] - 1) + 1
    return int(-(-reach // window.stride[0]))


def _cover(x: Tensor, window: Window, dim: int, size: int, offset: int, fill: int) -> Tensor:
    """For each input along ``dim``, ``x`` at the ``offset``-th last output starting at or before it; ``fill`` where
    none is.
    """
    stride, low = window.stride[0], _covers(window) - 1
    high = (stride - 1 + window.dilation[0] * (window.kernel[0] - 1)) // stride
    repeated = _repeat(aten.constant_pad_nd.default(x, [0, 0] * (-dim - 1) + [low, high], fill), dim, stride)
    start = window.padding[0] + (low - offset) * stride
    return aten.slice.Tensor(repeated, dim, start, start + size, 1)


def _sum_of_covers(x: Tensor, window: Window, dim: int, size: int) -> Tensor:
    """Along ``dim``, each input's sum over the outputs whose windows hold it."""
    stride, kernel = window.stride[0], window.kernel[0]
    phase = (torch.arange(size, device=x.device) + window.padding[0]) % stride
    total: Tensor | None = None
    for offset in range(_covers(window)):
        part = _cover(x, window, dim, size, offset, 0)
        # Only the farthest output may end before the element: the nearer ones hold it whatever its phase.
        if (offset + 1) * stride > kernel:
            part = torch.where(_along(phase + offset * stride < kernel, dim), part, 0)
        total = part if total is None else total + part
    assert total is not None, "a window has at least one tap"
    return total


def window_lengths(window: Window, like: Tensor, dim: int, size: int, include_pad: bool) -> Tensor:
    """How many elements each output along ``dim`` divides by, as PyTorch counts them, ready to broadcast."""
    kernel, stride, padding = window.kernel[0], window.stride[0], window.padding[0]
    start = torch.arange(like.shape[dim], device=like.device) * stride - padding
    end = (start + kernel).clamp(max=size + padding)
    counts = end - start if include_pad else end.clamp(max=size) - start.clamp(min=0)
    return _along(counts.to(_computed(like).dtype), dim)


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


def _repeat(x: Tensor, dim: int, times: int) -> Tensor:
    """Each element ``times`` in a row along ``dim`` (negative)."""
    if times == 1:
        return x
    lead, tail = x.shape[: x.dim() + dim + 1], x.shape[x.dim() + dim + 1 :]
    return x.unsqueeze(x.dim() + dim + 1).expand(*lead, times, *tail).reshape(*lead[:-1], lead[-1] * times, *tail)


def _flat_positions(size: Sequence[int], device: torch.device) -> Tensor:
    """``[*size]`` of i64: each element's index in the flattened plane."""
    positions = torch.arange(size[0], device=device)
    for length in size[1:]:
        positions = positions.unsqueeze(-1) * length + torch.arange(length, device=device)
    return positions


def _along(vector: Tensor, dim: int) -> Tensor:
    """A vector shaped to broadcast along ``dim`` (negative)."""
    return vector.reshape(-1, *[1] * (-dim - 1))


def _are_static(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _computed(x: Tensor) -> Tensor:
    """Half types are added up in f32 and rounded once."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


_NONE = "neither PyTorch nor torch-mlir decomposes it"
_SCATTER = "torch-mlir's form is a scatter whose targets repeat, which IREE runs as one loop in sequence"
_WHOLE = "PyTorch's form gathers the windows of all axes at once, in twice the time"
_ABORT = "torch-mlir's lowering ends the process"

ENTRIES = (
    Decomposition(aten.avg_pool2d_backward.default, partial(avg_pool_backward, 2), _NONE),
    Decomposition(aten.avg_pool3d_backward.default, partial(avg_pool_backward, 3), _NONE),
    Decomposition(aten.max_pool2d_with_indices_backward.default, partial(max_pool_backward, 2), _SCATTER),
    Decomposition(aten.max_pool3d_with_indices_backward.default, partial(max_pool_backward, 3), _SCATTER),
    Decomposition(aten._adaptive_avg_pool2d.default, adaptive_avg_pool, _WHOLE),
    Decomposition(aten._adaptive_avg_pool3d.default, adaptive_avg_pool, _WHOLE),
    Decomposition(aten._adaptive_avg_pool2d_backward.default, partial(adaptive_avg_pool_backward, 2), _NONE),
    Decomposition(aten._adaptive_avg_pool3d_backward.default, partial(adaptive_avg_pool_backward, 3), _NONE),
    Decomposition(aten.adaptive_max_pool2d_backward.default, partial(adaptive_max_pool_backward, 2), _ABORT),
    Decomposition(aten.adaptive_max_pool3d_backward.default, partial(adaptive_max_pool_backward, 3), _ABORT),
)
