# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pooling: gradients written from the input's side.

Each input element asks the few outputs whose windows may cover it, instead of each output adding into its window: no
scatter, which IREE runs one element at a time, and none of its hazards with overlapping windows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from retrograd.frontend.decompositions.convolutions.im2col import is_static
from retrograd.frontend.decompositions.convolutions.windows import Tap, Window, along, spread_axes
from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.decompositions.sums import computed

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
    if not is_static(size):
        # Torch cannot tell what slices between axes leave of open sizes.
        return _sum_of_covers(share, window, size).to(x.dtype)
    first = x.dim() - rank
    for axis in range(rank):
        # One axis after another: there are fewer outputs along one than side by side.
        share = _sum_of_covers(share, window.along((axis,)), [*size[: axis + 1], *share.shape[first + axis + 1 :]])
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
    # Four bytes compare twice as many at a time as eight, and no plane has 2^31 elements.
    grads = [view for _, view in covering(computed(grad), window, size, 0)]
    picks = [view for _, view in covering(indices.to(torch.int32), window, size, -1)]
    own = _own_places(picks[0], window, size)
    parts = [torch.where(pick == own, value, 0) for value, pick in zip(grads, picks, strict=True)]
    total = sum(parts[1:], parts[0])
    return _cut(total, window, size).to(x.dtype)


def covering(x: Tensor, window: Window, size: Sequence[int], fill: int) -> Iterator[tuple[Tap, Tensor]]:
    """Yield views of the outputs ``x [..., *out]`` whose windows may hold an input of ``[..., *size]``, each behind
    the number of outputs, along each axis, that it is in front of the last that starts at or before the input.

    Inputs are counted from the padding on and in blocks of a stride's length, of which all have the same outputs: each
    view is ``[..., blocks, 1]`` for each axis, with ``fill`` where there is no output.
    """
    first = x.dim() - window.rank
    low = [count - 1 for count in _count_covers(window)]
    high = [_blocks_beyond(window.axis(axis), n, x.shape[first + axis]) for axis, n in enumerate(size)]
    pairs = [pair for axis in reversed(range(window.rank)) for pair in (low[axis], high[axis])]
    padded = aten.constant_pad_nd.default(x, pairs, fill) if any(pairs) else x
    blocks = [x.shape[first + axis] + high[axis] for axis in range(window.rank)]
    for offsets in itertools.product(*map(range, _count_covers(window))):
        view = padded
        for axis, offset in enumerate(offsets):
            start = low[axis] - offset
            view = aten.slice.Tensor(view, first + axis, start, start + blocks[axis])
        yield offsets, view.reshape(*x.shape[:first], *(n for count in blocks for n in (count, 1)))


def _blocks_beyond(window: Window, size: int, out: int) -> int:
    """How many blocks along one axis no output starts in; at the most, where sizes are open: those then stay out of the
    answer."""
    (stride,) = window.stride
    if is_static((size, out)):
        return -(-(size + window.padding[0]) // stride) - out
    return (_reach(window)[0] + stride - 2) // stride


def _own_places(view: Tensor, window: Window, size: Sequence[int]) -> Tensor:
    """The flat place in ``[*size]`` of each element of the blocks that ``view`` covers: ``[blocks, stride]`` for each
    axis, int32."""
    rank = window.rank
    own: Tensor | None = None
    for axis, (stride, padding) in enumerate(zip(window.stride, window.padding, strict=True)):
        blocks = view.shape[view.dim() + 2 * (axis - rank)]
        line = torch.arange(blocks * stride, device=view.device, dtype=torch.int32) - padding
        line = line.reshape(blocks, stride, *[1] * (2 * (rank - 1 - axis)))
        own = line if own is None else own * size[axis] + line
    assert own is not None, "a window has an axis"
    return own


def _cut(blocks: Tensor, window: Window, size: Sequence[int]) -> Tensor:
    """``[..., blocks, stride]`` for each axis as ``[..., *size]``."""
    rank = window.rank
    lead, pairs = blocks.shape[: blocks.dim() - 2 * rank], blocks.shape[blocks.dim() - 2 * rank :]
    whole = blocks.reshape(*lead, *(pairs[2 * axis] * pairs[2 * axis + 1] for axis in range(rank)))
    for axis, length in enumerate(size):
        start = window.padding[axis]
        whole = aten.slice.Tensor(whole, axis - rank, start, start + length)
    return whole


def _reach(window: Window) -> list[int]:
    """From its first to its last tap, how many inputs a window spans along each axis."""
    return [dilation * (kernel - 1) + 1 for kernel, dilation in zip(window.kernel, window.dilation, strict=True)]


def _count_covers(window: Window) -> list[int]:
    """How many outputs in a row may have a window over the same element, along each axis."""
    return [-(-reach // stride) for reach, stride in zip(_reach(window), window.stride, strict=True)]


def _sum_of_covers(x: Tensor, window: Window, size: Sequence[int]) -> Tensor:
    """Each input's sum over the outputs whose windows hold it."""
    total: Tensor | None = None
    for offsets, value in covering(x, window, size, 0):
        part = value
        for axis, (offset, stride, kernel) in enumerate(zip(offsets, window.stride, window.kernel, strict=True)):
            # Only the farthest output may end before the element: the nearer ones hold it whatever its place.
            if (offset + 1) * stride > kernel:
                places = torch.arange(stride, device=x.device)
                part = torch.where(along(places < kernel - offset * stride, 2 * (axis - window.rank) + 1), part, 0)
        total = part if total is None else total + part
    assert total is not None, "a window has at least one tap"
    lead, blocks = total.shape[: total.dim() - 2 * window.rank], total.shape[total.dim() - 2 * window.rank :: 2]
    pairs = zip(blocks, window.stride, strict=True)
    return _cut(total.expand(*lead, *(n for pair in pairs for n in pair)), window, size)


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
