# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Views by sizes and strides in memory, as what they mean for a tensor's values: slices of its axes where they are
that, else places in a row of its elements. Writing to a view (``CopySlices``) leaves such ops in a backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cmp_to_key
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import statically_known_true

from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.decompositions.places.indexing import put_counted
from retrograd.frontend.python.source_locations import CaptureError

aten = torch.ops.aten


@dataclass(frozen=True)
class Window:
    """A view of a contiguous tensor as one slice of each of its axes, in another order.

    Of axis k, ``counts[k]`` elements are taken, from ``starts[k]`` on and ``steps[k]`` apart; ``axes`` are those of the
    tensor that the view's axes of more than one element go along.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[int, ...]
    axes: tuple[int, ...]

    def order(self) -> list[int]:
        """All axes of the tensor: those of the view in its order, then those of one element."""
        return [*self.axes, *(axis for axis in range(len(self.counts)) if axis not in self.axes)]


def find_window(shape: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int) -> Window | None:
    """The window that ``as_strided(size, stride, offset)`` is of a contiguous tensor of ``shape``; ``None`` where it
    goes across rows, or over elements more than once."""
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    starts, rest = [], offset
    for length in strides:
        # A step of open length: what there is no telling of is left to the axes further in.
        start, rest = divmod(rest, length) if _are_numbers(rest, length) else (0, rest)
        starts.append(start)
    if rest or not all(_known(length > start) for start, length in zip(starts, shape, strict=True)):
        return None
    counts, steps, axes = [1] * len(shape), [1] * len(shape), []
    for count, step in zip(size, stride, strict=True):
        if _known(count == 1):
            continue
        along = next(
            (
                axis
                for axis, (start, length) in enumerate(zip(starts, strides, strict=True))
                if axis not in axes
                and _known(step % length == 0)
                and _known(step > 0)
                and _known(shape[axis] - start - (count - 1) * (step // length) > 0)
            ),
            None,
        )
        if along is None:
            return None
        counts[along], steps[along] = count, step // strides[along]
        axes.append(along)
    return Window(tuple(starts), tuple(counts), tuple(steps), tuple(axes))


def _known(condition: Any) -> bool:
    """Whether a condition holds, of open sizes for all that they may be: nothing is taken for granted."""
    return statically_known_true(condition)


def _are_numbers(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """``aten.as_strided``; ``NotImplemented`` where it is no window for all that open sizes may be, where it looks at
    nothing, and of tensors with gaps.

    Raises:
        CaptureError: it looks at memory that is not the tensor's own.
    """
    place = find_place(x, size, stride, storage_offset)
    if place is None:
        if is_outside(x, size, stride, storage_offset):
            raise CaptureError(
                "as_strided looks at memory that is not its tensor's own, of which compiled code is given that alone",
                "pass the tensor that it is a view of, and take the view inside of the model",
            )
        return NotImplemented
    rows = x.permute(place.order)
    if place.window is None:
        return aten.index.Tensor(rows.reshape(-1), [_places(x, size, stride, place.offset)])
    rows = rows.reshape(place.shape)
    for axis in range(rows.dim()):
        rows = _slice(rows, place.window, axis)
    return rows.permute(place.window.order()).reshape(size)


def as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """``aten.as_strided_scatter``: ``x`` with ``src`` where ``as_strided`` looks; ``NotImplemented`` as there, and
    where it looks at an element more than once."""
    place = find_place(x, size, stride, storage_offset)
    if place is None:
        return NotImplemented
    if place.window is None:
        if is_overlapping(size, stride):
            return NotImplemented
        rows, places = x.permute(place.order), _places(x, size, stride, place.offset)
        row = put_counted(rows.reshape(-1), [places.reshape(-1)], src.expand(size).reshape(-1))
        return row.reshape(rows.shape).permute([place.order.index(axis) for axis in range(x.dim())])
    rows, turned = x.permute(place.order), place.window.order()
    values = src.expand(size).reshape([place.window.counts[axis] for axis in turned])
    values = values.permute([turned.index(axis) for axis in range(len(turned))])
    written = _write(rows.reshape(place.shape), values, place.window, 0).reshape(rows.shape)
    return written.permute([place.order.index(axis) for axis in range(x.dim())])


def is_outside(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> bool:
    """Whether a view looks at memory before the first element of ``x`` or behind the last; not for open sizes."""
    numbers = [*x.shape, *x.stride(), x.storage_offset(), *size, *stride, storage_offset or 0]
    if not all(isinstance(number, int) for number in numbers) or 0 in (*x.shape, *size):
        return False
    offset = 0 if storage_offset is None else storage_offset - x.storage_offset()
    return offset < 0 or offset + _reach(size, stride) > _reach(x.shape, x.stride())


def _reach(size: Sequence[int], stride: Sequence[int]) -> int:
    """How far behind its first element a view's last one is."""
    return sum((count - 1) * step for count, step in zip(size, stride, strict=True))


def is_overlapping(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a view by these sizes and strides may look at an element more than once. In doubt it may: a view whose
    axes, the shortest steps first, each step over all that those before reach does not."""
    reached = 0
    for step, count in sorted((step, count) for count, step in zip(size, stride, strict=True) if count > 1):
        if step <= reached:
            return True
        reached += step * (count - 1)
    return False


@dataclass(frozen=True)
class Place:
    """Where a view is in the memory of a tensor: ``order`` is that of the tensor's axes in which it is contiguous, and
    ``offset`` how far behind its first element the view starts; ``window`` the slice that it is of the elements in
    that order, in the form of ``shape``, if it is one."""

    order: list[int]
    offset: int
    shape: tuple[int, ...]
    window: Window | None


def find_place(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> Place | None:
    """The place of ``as_strided(x, size, stride, storage_offset)``; ``None`` where it looks at memory that is not the
    tensor's own, or there is no telling for open sizes."""
    # What open sizes are compared by is no part of a graph that is being traced.
    with disable_proxy_modes_tracing():
        return _find_place(x, size, stride, storage_offset)


def _find_place(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> Place | None:
    numbers = [*x.shape, *x.stride(), x.storage_offset(), *size, *stride, storage_offset or 0]
    if not all(_known(count > 0) for count in (*x.shape, *size)):
        return None
    # An open one stays what it is.
    offset: Any = 0 if storage_offset is None else storage_offset - x.storage_offset()
    order = _order_in_memory(x)
    whole = tuple(x.shape[axis] for axis in order)
    inside = _known(offset >= 0) and _known(x.numel() - offset - _reach(size, stride) > 0)
    if not inside or not _are_contiguous(whole, [x.stride()[axis] for axis in order]):
        return None
    # A step through a row of all elements need be none along an axis, nor the view's axes the tensor's.
    for shape in (whole, (x.numel(),), _shape_of_strides(x.numel(), stride)):
        window = find_window(shape, size, stride, offset)
        if window is not None:
            return Place(order, offset, shape, window)
    return Place(order, offset, whole, None) if _are_numbers(*numbers) else None


def _order_in_memory(x: Tensor) -> list[int]:
    """The axes of ``x``, the longest steps first; those of equal steps, and of which there is no telling, as they
    are."""

    def compare(one: int, other: int) -> int:
        first, second = x.stride()[one], x.stride()[other]
        return _known(second > first) - _known(first > second)

    return sorted(range(x.dim()), key=cmp_to_key(compare))


def _are_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor of this shape and these strides has no gaps, and its last axis steps by one element."""
    return all(
        _known(count == 1) or _known(step == prod(shape[axis + 1 :]))
        for axis, (count, step) in enumerate(zip(shape, stride, strict=True))
    )


def _shape_of_strides(numel: int, stride: Sequence[int]) -> tuple[int, ...]:
    """The shape of so many elements whose axes have these strides, if there is one; else that of a row."""
    steps = sorted({step for step in stride if step > 0}, reverse=True) if _are_numbers(*stride) else stride
    lengths = [numel, *steps, 1]
    if not all(_known(shorter > 0) and _known(longer % shorter == 0) for longer, shorter in pairwise(lengths)):
        return (numel,)
    return tuple(longer // shorter for longer, shorter in pairwise(lengths))


def _slice(x: Tensor, window: Window, axis: int) -> Tensor:
    start, count, step = window.starts[axis], window.counts[axis], window.steps[axis]
    if _known(count == x.shape[axis]):
        return x
    sliced: Tensor = aten.slice.Tensor(x, axis, start, _end(start, count, step), step)
    return sliced


def _end(start: int, count: int, step: int) -> int:
    """Where a slice ends. An open count is what it was where nothing is added: a sum that comes to the same would, in a
    trace, be its own operand."""
    if step != 1:
        return start + (count - 1) * step + 1
    return start + count if start else count


def _write(x: Tensor, values: Tensor, window: Window, axis: int) -> Tensor:
    """``x`` with ``values`` in the window, whose axes before ``axis`` have been sliced already."""
    if axis == x.dim():
        return values
    part = _write(_slice(x, window, axis), values, window, axis + 1)
    start, count, step = window.starts[axis], window.counts[axis], window.steps[axis]
    if _known(count == x.shape[axis]):
        return part
    written: Tensor = aten.slice_scatter.default(x, part, axis, start, _end(start, count, step), step)
    return written


def _places(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """Where each element of a view is in the row of all elements."""
    places = torch.full([1] * len(size), offset, dtype=torch.int64, device=x.device)
    for axis, (count, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(count, device=x.device) * step
        places = places + along.reshape(-1, *[1] * (len(size) - 1 - axis))
    return places


_REASON = "torch-mlir has no lowering for the one, and gathers element by element for the other"

ENTRIES = (
    Decomposition(aten.as_strided.default, as_strided, _REASON),
    Decomposition(aten.as_strided_scatter.default, as_strided_scatter, _REASON),
)
