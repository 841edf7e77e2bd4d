# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Columns of large windows (im2col), axis by axis: ops grow with the sum of the window's sides, not with their product.

A window of 7 x 7 taps is 49 slices, and each is a kernel to compile; along one axis after the other it is 14. Along an
axis whose stride is no less than half the window, columns are a view of blocks of a stride's length: that of patches
that do not overlap (the first layer of a vision transformer) is a permutation. A long axis of stride 1 is a window of
windows, so that 400 taps are 40 slices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from retrograd.frontend.decompositions.convolutions.windows import Window, fold, slice_axis, tap_views

aten = torch.ops.aten

# Up to so many taps, a slice for each is the faster code.
FEW_TAPS = 9
# From so many slices along one axis on, it is a window of windows.
_LONG = 17
# Columns past this size cost more to write than they save; they are then built for a part of the taps at a time.
COLUMN_BYTES = 1 << 20


@dataclass(frozen=True)
class Columns:
    """How the columns of ``window`` over ``[B, C, ..., *size]`` are built, of which it has ``[*out]``: for each tap
    along the first ``leading`` axes by themselves, a *chunk*.

    A chunk is ``[B, taps * C, positions]``, positions being ``[..., *out]`` flattened, taps in the order of
    ``Window.taps``. ``by_tap`` says that each tap is a slice of its own, which serves few taps, and open sizes.
    """

    window: Window
    size: tuple[int, ...]
    out: tuple[int, ...]
    leading: int
    by_tap: bool

    @classmethod
    def plan(
        cls, window: Window, size: Sequence[int], out: Sequence[int], lead: Sequence[int], itemsize: int
    ) -> Columns:
        """The fewest chunks that are small enough, for ``[*lead, *size]`` of ``itemsize`` bytes. Columns of windows
        that hardly overlap are of the tensor's own size, which is always small enough."""
        by_tap = math.prod(window.kernel) <= FEW_TAPS or not is_static((*size, *out))
        bytes_per_tap = math.prod((*lead, *out)) * itemsize
        leading = 0
        # A symbolic size is not asked: the answer would become a guard.
        if is_static((bytes_per_tap,)):
            enough = COLUMN_BYTES if by_tap else max(COLUMN_BYTES, 2 * math.prod((*lead, *size)) * itemsize)
            choices = (0, window.rank - 1) if by_tap else range(window.rank)
            fit = (i for i in choices if bytes_per_tap * math.prod(window.kernel[i:]) <= enough)
            leading = next(fit, window.rank - 1)
        return cls(window, tuple(size), tuple(out), leading, by_tap)

    def build(self, x: Tensor) -> Iterator[Tensor]:
        """The chunks of ``x``, ``[B, C, ..., *size]``, each traced when it is asked for: kernels run in the order of a
        trace, and a chunk that is used at once need not be in memory beside the others."""
        rank, depth = self.window.rank, x.shape[1]
        if self.by_tap:
            views = iter(tap_views(x, self.window, self.window.taps(), self.out))
            while part := list(itertools.islice(views, self._taps())):
                # Joined before positions are flattened: IREE then copies each tap once, and not to a tensor of its own
                # first.
                yield (part[0] if len(part) == 1 else torch.cat(part, 1)).flatten(2)
            return
        lead, sliced = self._lead(), (*self.out[: self.leading], *self.size[self.leading :])
        for view in tap_views(x, lead, lead.taps(), sliced) if self.leading else [x]:
            chunk = view
            for axis in reversed(range(self.leading, rank)):
                chunk = _stack_axis(chunk, axis - rank, self.window.axis(axis), self.out[axis])
            yield chunk.reshape(x.shape[0], self._taps() * depth, -1)

    def fold(self, chunks: Sequence[Tensor]) -> Tensor:
        """The adjoint of ``build`` for ``[B, C, *size]``."""
        rank, inner = self.window.rank, self.window.kernel[self.leading :]
        if self.by_tap:
            views = [c.reshape(c.shape[0], self._taps(), -1, *self.out) for c in chunks]
            values = [view[:, i] for view in views for i in range(self._taps())]
            return fold(zip(self.window.taps(), values, strict=True), self.window, self.size)
        views = [c.reshape(c.shape[0], *inner, c.shape[1] // self._taps(), *self.out) for c in chunks]
        total = views[0]
        if self.leading:
            partial = [*self.size[: self.leading], *self.out[self.leading :]]
            total = fold(zip(self._lead().taps(), views, strict=True), self._lead(), partial)
        for axis in range(self.leading, rank):
            total = _fold_axis(total, axis - rank, self.window.axis(axis), self.size[axis])
        return total

    def split_filter(self, weight: Tensor) -> list[Tensor]:
        """``[O, C, *kernel]`` as ``[O, taps * C]`` for each chunk, columns in the order of the chunk's rows."""
        rank = self.window.rank
        rows = weight.permute(0, *range(2, rank + 2), 1)
        parts = []
        for tap in self._lead().taps():
            part = rows
            for axis, position in enumerate(tap[: self.leading]):
                part = part.narrow(axis + 1, position, 1)
            parts.append(part.reshape(weight.shape[0], self._taps() * weight.shape[1]))
        return parts

    def _taps(self) -> int:
        """How many taps a chunk has."""
        return math.prod(self.window.kernel[self.leading :])

    def _lead(self) -> Window:
        """The window along the leading axes alone."""
        return self.window.along(range(self.leading))


def is_static(sizes: Iterable[int]) -> bool:
    """Whether all are numbers: a size that is a symbol is not asked."""
    return all(isinstance(n, int) for n in sizes)


def _stack_axis(x: Tensor, axis: int, line: Window, out: int) -> Tensor:
    """``[B, ...]`` as ``[B, kernel, ...]``, with ``out`` places along ``axis`` (negative)."""
    (kernel,), (stride,), (padding,), (dilation,) = line.kernel, line.stride, line.padding, line.dilation
    if _is_blocked(line):
        count = -(-kernel // stride)
        padded = _pad(x, axis, padding, padding + count * stride - kernel)
        padded = slice_axis(padded, axis, 0, (out - 1 + count) * stride)
        # What has the same remainder modulo the stride is side by side: all taps are contiguous slices.
        phases = padded.unflatten(axis, (-1, stride)).movedim(axis, 1)
        parts = [slice_axis(phases, axis, i, i + out) for i in range(count)]
        parts[-1] = slice_axis(parts[-1], 1, 0, kernel - (count - 1) * stride)
        return torch.cat(parts, 1) if count > 1 else parts[0]
    if kernel < _LONG:
        padded = _pad(x, axis, padding, padding)
        starts = [tap * dilation for tap in range(kernel)]
        return _stack([slice_axis(padded, axis, n, n + (out - 1) * stride + 1, stride) for n in starts])
    inner, outer, reach = _windows_of_windows(line, out)
    padded = _pad(x, axis, 0, (inner.kernel[0] * outer.kernel[0] - kernel) * dilation)
    stacked = _stack_axis(_stack_axis(padded, axis, inner, reach), axis, outer, out)
    return slice_axis(stacked.flatten(1, 2), 1, 0, kernel)


def _fold_axis(y: Tensor, axis: int, line: Window, size: int) -> Tensor:
    """The adjoint of ``_stack_axis``: ``[B, kernel, ...]`` as ``[B, ...]``, with ``size`` places along ``axis``."""
    (kernel,), (stride,), (padding,), (dilation,) = line.kernel, line.stride, line.padding, line.dilation
    out = y.shape[axis]
    if _is_blocked(line):
        count = -(-kernel // stride)
        blocks = _pad(y, 1 - y.dim(), 0, count * stride - kernel).unflatten(1, (count, stride)).movedim(2, axis)
        total = _add([_pad(blocks.select(1, i), axis - 1, i, count - 1 - i) for i in range(count)])
        whole = total.flatten(axis - 1, axis)
    elif kernel < _LONG:
        spread = _pad(y.unsqueeze(axis), axis, 0, stride - 1).flatten(axis - 1, axis) if stride > 1 else y
        reach = (kernel - 1) * dilation
        whole = _add([_pad(spread.select(1, i), axis, i * dilation, reach - i * dilation) for i in range(kernel)])
    else:
        inner, outer, reach = _windows_of_windows(line, out)
        steps = (outer.kernel[0], inner.kernel[0])
        filled = _pad(y, 1 - y.dim(), 0, steps[0] * steps[1] - kernel).unflatten(1, steps)
        return _fold_axis(_fold_axis(filled, axis, outer, reach), axis, inner, size)
    # Output padding and dilation may reach past the last window.
    more = max(padding + size - whole.shape[axis], 0)
    return slice_axis(_pad(whole, axis, 0, more), axis, padding, padding + size)


def _is_blocked(line: Window) -> bool:
    """Whether columns along an axis are a few views of blocks of a stride's length."""
    return line.stride[0] > 1 and line.dilation[0] == 1 and line.kernel[0] > 1


def _windows_of_windows(line: Window, out: int) -> tuple[Window, Window, int]:
    """A long axis as windows of neighbouring taps and windows of these; and how many of the former there are."""
    (kernel,), (stride,), (dilation,) = line.kernel, line.stride, line.dilation
    near = math.isqrt(kernel)
    far = -(-kernel // near)
    inner = Window((near,), (1,), line.padding, (dilation,))
    outer = Window((far,), (stride,), (0,), (near * dilation,))
    return inner, outer, (out - 1) * stride + (far - 1) * near * dilation + 1


def _stack(views: Sequence[Tensor]) -> Tensor:
    return views[0].unsqueeze(1) if len(views) == 1 else torch.stack(list(views), 1)


def _add(parts: Sequence[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])


def _pad(x: Tensor, axis: int, low: int, high: int) -> Tensor:
    """``x`` with zeros before and after ``axis`` (negative)."""
    return aten.constant_pad_nd.default(x, [0, 0] * (-axis - 1) + [low, high], 0) if low or high else x
