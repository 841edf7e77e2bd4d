# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sliding windows as slices and pads: what convolution and pooling share.

A *tap* is one position inside the window. The view of a tensor at a tap holds, for each output position, the element
the window has there; folding is the adjoint: it adds each tap's values back to where the view took them from. Slices
and pads fuse with what stands around them, where a gather or a scatter becomes a loop over single elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.python.source_locations import CaptureError

Tap = tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """A window over ``rank`` spatial axes: its ``kernel``, ``stride``, ``padding`` and ``dilation``, in elements."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(
        cls, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
    ) -> Window:
        """Takes lists as aten has them: one number stands for every axis, an empty stride means the kernel's size."""
        rank = len(kernel)
        return cls(
            tuple(kernel), spread_axes(stride or kernel, rank), spread_axes(padding, rank), spread_axes(dilation, rank)
        )

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return len(self.kernel)

    def taps(self) -> list[Tap]:
        """Every tap, the last axis fastest."""
        return list(itertools.product(*map(range, self.kernel)))

    def along(self, axes: Container[int]) -> Window:
        """The window along these axes, of one tap along all others."""

        def keep(values: Sequence[int], other: int) -> tuple[int, ...]:
            return tuple(value if axis in axes else other for axis, value in enumerate(values))

        return Window(keep(self.kernel, 1), keep(self.stride, 1), keep(self.padding, 0), keep(self.dilation, 1))

    def axis(self, axis: int) -> Window:
        """The window along one axis alone."""
        return Window((self.kernel[axis],), (self.stride[axis],), (self.padding[axis],), (self.dilation[axis],))


def spread_axes(values: Sequence[int], rank: int) -> tuple[int, ...]:
    """``values`` for each of ``rank`` axes; one value stands for all."""
    return tuple(values) * rank if len(values) == 1 else tuple(values)


def pad_axes(x: Tensor, low: Sequence[int], high: Sequence[int]) -> Tensor:
    """``x`` with zeros before and after its last ``len(low)`` axes."""
    if not any(low) and not any(high):
        return x
    pairs = [pair for axis in reversed(range(len(low))) for pair in (low[axis], high[axis])]
    return torch.ops.aten.constant_pad_nd.default(x, pairs, 0)


def slice_axis(x: Tensor, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
    """``x`` from ``start`` to ``stop`` along ``axis``, at each ``step``; itself, where that is all of it. A size that
    is a symbol is not asked: the answer would become a guard."""
    size = x.shape[axis]
    known = isinstance(size, int) and isinstance(stop, int)
    whole = known and start == 0 and stop == size and (step == 1 or size == 1)
    return x if whole else torch.ops.aten.slice.Tensor(x, axis % x.dim(), start, stop, step)


def tap_views(x: Tensor, window: Window, taps: Iterable[Tap], out: Sequence[int]) -> Iterator[Tensor]:
    """The view of ``x`` (``[..., *spatial]``) at each tap, ``[..., *out]``, traced when it is asked for."""
    first = x.dim() - window.rank
    # By the first positions of a tap: those of one row share it.
    views: dict[Tap, Tensor] = {(): pad_axes(x, window.padding, window.padding)}
    for tap in taps:
        for axis, position in enumerate(tap):
            if tap[: axis + 1] not in views:
                start, stride = position * window.dilation[axis], window.stride[axis]
                stop = start + (out[axis] - 1) * stride + 1
                views[tap[: axis + 1]] = slice_axis(views[tap[:axis]], first + axis, start, stop, stride)
        yield views[tap]


def fold(contributions: Iterable[tuple[Tap, Tensor]], window: Window, size: Sequence[int]) -> Tensor:
    """The adjoint of ``tap_views``: ``[..., *out]`` per tap, added up into ``[..., *size]``. Only the final slice
    depends on ``size``, so that a size which is a symbol stays one."""
    total: Tensor | None = None
    reach = [(kernel - 1) * dilation for kernel, dilation in zip(window.kernel, window.dilation, strict=True)]
    for tap, value in contributions:
        low = [position * dilation for position, dilation in zip(tap, window.dilation, strict=True)]
        high = [end - start + more for start, end, more in zip(low, reach, _beyond(window), strict=True)]
        placed = pad_axes(_interleave_zeros(value, window.stride), low, high)
        total = placed if total is None else total + placed
    assert total is not None, "a window has at least one tap"
    first = total.dim() - window.rank
    for axis, length in enumerate(size):
        start = window.padding[axis]
        total = slice_axis(total, first + axis, start, start + length)
    return total


def merge_phases(phases: Sequence[Tensor], stride: Sequence[int], size: Sequence[int]) -> Tensor:
    """Interleaves ``[N, C, *quotients]`` for each remainder modulo ``stride``, last axis fastest: ``[N, C, *size]``."""
    if len(phases) == 1:
        return phases[0]
    rank = len(stride)
    lead, quotients = phases[0].shape[:2], phases[0].shape[2:]
    # One behind the other, each is written where it belongs, and one kernel interleaves them.
    stacked = torch.stack(list(phases)).reshape(*stride, *lead, *quotients)
    order = [axis for i in range(rank) for axis in (2 + rank + i, i)]
    merged = stacked.permute(rank, rank + 1, *order).reshape(
        *lead, *(q * s for q, s in zip(quotients, stride, strict=True))
    )
    for axis, length in enumerate(size):
        merged = slice_axis(merged, axis + 2, 0, length)
    return merged


def repeat(x: Tensor, dim: int, times: int) -> Tensor:
    """Each element ``times`` in a row along ``dim`` (negative)."""
    if times == 1:
        return x
    lead, tail = x.shape[: x.dim() + dim + 1], x.shape[x.dim() + dim + 1 :]
    return x.unsqueeze(x.dim() + dim + 1).expand(*lead, times, *tail).reshape(*lead[:-1], lead[-1] * times, *tail)


def along(vector: Tensor, dim: int) -> Tensor:
    """A vector shaped to broadcast along ``dim`` (negative)."""
    return vector.reshape(-1, *[1] * (-dim - 1))


def _beyond(window: Window) -> list[int]:
    """Output padding and dilation together may reach past the last window; this many zeros are there."""
    return [max(dilation - stride, 0) for dilation, stride in zip(window.dilation, window.stride, strict=True)]


def _interleave_zeros(x: Tensor, stride: Sequence[int]) -> Tensor:
    """``x`` with ``stride - 1`` zeros after each element, along its last ``len(stride)`` axes."""
    if all(step == 1 for step in stride):
        return x
    rank = len(stride)
    lead, spatial = x.shape[: x.dim() - rank], x.shape[x.dim() - rank :]
    paired = x.reshape(*lead, *(n for length in spatial for n in (length, 1)))
    high = [n for step in stride for n in (0, step - 1)]
    padded = pad_axes(paired, [0] * len(high), high)
    return padded.reshape(*lead, *(length * step for length, step in zip(spatial, stride, strict=True)))


aten = torch.ops.aten


def refusing_written_windows(table: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """``table``, a model's decompositions, less what windows that were written to become.

    Functionalization puts these back by ``aten.unfold_backward``, as if they were a gradient: elements in no window
    become zero, and those in several are added up. ``torch.compile`` computes that without a word. The gradient itself
    is only ever computed while autograd's engine runs.
    """
    gradient = table[aten.unfold_backward.default]

    def unfold_backward(grad: Tensor, sizes: Any, dim: int, size: int, step: int) -> Any:
        if torch._C._current_graph_task_id() == -1:
            raise CaptureError(
                "the model writes to windows that Tensor.unfold gave, or to a view of them, which are views: in a "
                "graph, elements in no window or in several would be lost",
                "write to x.unfold(...).clone(), or to the tensor itself",
            )
        return gradient(grad, sizes, dim, size, step)

    return {**table, aten.unfold_backward.default: unfold_backward}
