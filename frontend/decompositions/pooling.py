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

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.decompositions.sums import computed
from retrograd.frontend.decompositions.windows import Window, along, flat_positions, repeat, spread_axes

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
    share = computed(grad)
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
    own = flat_positions(size, x.device)
    # Four bytes compare twice as many at a time as eight, and no plane has 2^31 elements.
    grads, picks = computed(grad), indices.to(torch.int32)
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
    repeated = repeat(aten.constant_pad_nd.default(x, [0, 0] * (-dim - 1) + [low, high], fill), dim, stride)
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
            part = torch.where(along(phase + offset * stride < kernel, dim), part, 0)
        total = part if total is None else total + part
    assert total is not None, "a window has at least one tap"
    return total


def window_lengths(window: Window, like: Tensor, dim: int, size: int, include_pad: bool) -> Tensor:
    """How many elements each output along ``dim`` divides by, as PyTorch counts them, ready to broadcast."""
    kernel, stride, padding = window.kernel[0], window.stride[0], window.padding[0]
    start = torch.arange(like.shape[dim], device=like.device) * stride - padding
    end = (start + kernel).clamp(max=size + padding)
    counts = end - start if include_pad else end.clamp(max=size) - start.clamp(min=0)
    return along(counts.to(computed(like).dtype), dim)


_NONE = "neither PyTorch nor torch-mlir decomposes it"
_SCATTER = "torch-mlir's form is a scatter whose targets repeat, which IREE runs as one loop in sequence"

ENTRIES = (
    Decomposition(aten.avg_pool2d_backward.default, partial(avg_pool_backward, 2), _NONE),
    Decomposition(aten.avg_pool3d_backward.default, partial(avg_pool_backward, 3), _NONE),
    Decomposition(aten.max_pool2d_with_indices_backward.default, partial(max_pool_backward, 2), _SCATTER),
    Decomposition(aten.max_pool3d_with_indices_backward.default, partial(max_pool_backward, 3), _SCATTER),
)
