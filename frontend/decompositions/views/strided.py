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
from torch.utils._sympy.functions import Max

from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.decompositions.places.indexing import put_counted
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.sizes.taken_conditions import Conditions, Judge, deciding, known, make_size, may_take_conditions

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


def find_window(
    shape: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int, holds: Judge = known
) -> Window | None:
    """The window that ``as_strided(size, stride, offset)`` is of a contiguous tensor of ``shape``; ``None`` where it
    goes across rows, or over elements more than once. What ``holds`` of open sizes is gone by."""
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    starts, rest = [], offset
    for length in strides:
        start, rest = _divide(rest, length, holds)
        starts.append(start)
    if not holds(rest == 0) or not all(holds(length > start) for start, length in zip(starts, shape, strict=True)):
        return None
    counts, steps, axes = [1] * len(shape), [1] * len(shape), []
    for count, step in zip(size, stride, strict=True):
        if known(count == 1):
            continue
        taken = (
            (axis, times)
            for axis, (start, length) in enumerate(zip(starts, strides, strict=True))
            if axis not in axes
            and (times := _times(step, length, holds))
            and holds(shape[axis] - start - (count - 1) * times > 0)
        )
        along, times = next(taken, (None, 1))
        if along is None:
            return None
        counts[along], steps[along] = count, times
        axes.append(along)
    return Window(tuple(starts), tuple(counts), tuple(steps), tuple(axes))


def _times(step: int, length: int, holds: Judge) -> int:
    """How many steps along an axis a step of a view is; 0 where there is no telling."""
    if known(step % length == 0) and holds(step > 0):
        return step // length
    return int(not _are_numbers(step, length) and holds(step == length))


def _divide(rest: int, length: int, holds: Judge) -> tuple[int, int]:
    """Split a way through memory into whole steps along an axis and the rest. Of steps of open length, what there is no
    telling of is left to the axes further in."""
    if _are_numbers(rest, length):
        return divmod(rest, length)
    if holds is known or holds(length > rest):
        return 0, rest
    return rest // length, rest % length


def _are_numbers(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """``aten.as_strided``; ``NotImplemented`` where it is no window for all that open sizes may be, where it looks at
    nothing, and of tensors with gaps.

    Raises:
        CaptureError: it looks at memory that is not the tensor's own.
    """
    x = _settle(x, size, stride)
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
    x = _settle(x, size, stride)
    place = find_place(x, size, stride, storage_offset, scatters=True)
    if place is None:
        return NotImplemented
    if place.window is None:
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


def is_overlapping(size: Sequence[int], stride: Sequence[int], holds: Judge = known) -> bool:
    """Whether a view by these sizes and strides may look at an element more than once. In doubt it may: a view whose
    axes, the shortest steps first, each step over all that those before reach does not."""
    reached: Any = 0
    steps = [(step, count) for count, step in zip(size, stride, strict=True) if not known(count <= 1)]

    def compare(one: tuple[int, int], other: tuple[int, int]) -> int:
        return _compare(one[0], other[0], holds)

    for step, count in sorted(steps, key=cmp_to_key(compare)):
        if not holds(step > reached):
            return True
        reached += step * (count - 1)
    return False


def _compare(one: int, other: int, holds: Judge) -> int:
    """Compare two numbers for ``cmp_to_key``; what cannot be told apart is equal."""
    return holds(one > other) - holds(other > one)


@dataclass(frozen=True)
class Place:
    """Where a view is in the memory of a tensor: ``order`` is that of the tensor's axes in which it is contiguous, and
    ``offset`` how far behind its first element the view starts; ``window`` the slice that it is of the elements in
    that order, in the form of ``shape``, if it is one."""

    order: list[int]
    offset: int
    shape: tuple[int, ...]
    window: Window | None


def find_place(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None, *, scatters: bool = False
) -> Place | None:
    """The place of ``as_strided(x, size, stride, storage_offset)``; ``None`` where it looks at memory that is not the
    tensor's own, or, if it ``scatters``, at an element more than once; or where there is no telling for open sizes.

    What holds for the sizes of the example is taken as a condition of the program where nothing else tells."""
    # What open sizes are compared by is no part of a graph that is being traced.
    with disable_proxy_modes_tracing():
        place = _find_place(x, size, stride, storage_offset, scatters, known)
        if place is not None or not may_take_conditions():
            return place
        conditions = Conditions()
        place = _find_place(x, size, stride, storage_offset, scatters, conditions.hold)
        if place is None:
            return None
        conditions.take()
    # Once more, for what is computed on the way to be part of the graph.
    return _find_place(x, size, stride, storage_offset, scatters, conditions.hold)


def _find_place(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None, scatters: bool, holds: Judge
) -> Place | None:
    numbers = [*x.shape, *x.stride(), x.storage_offset(), *size, *stride, storage_offset or 0]
    if not all(known(count > 0) for count in (*x.shape, *size)):
        return None
    # An open one stays what it is.
    offset: Any = 0 if storage_offset is None else storage_offset - x.storage_offset()
    order = _order_in_memory(x, holds)
    whole = tuple(x.shape[axis] for axis in order)
    inside = holds(offset >= 0) and holds(x.numel() - offset - _reach(size, stride) > 0)
    if not inside or not _are_contiguous(whole, [x.stride()[axis] for axis in order], holds):
        return None
    # A step through a row of all elements need be none along an axis, nor the view's axes the tensor's.
    for shape in (whole, (x.numel(),), _shape_of_strides(x.numel(), stride)):
        window = find_window(shape, size, stride, offset, holds)
        if window is not None:
            return Place(order, offset, shape, window)
    if (holds is known and not _are_numbers(*numbers)) or (scatters and is_overlapping(size, stride, holds)):
        return None
    return Place(order, offset, whole, None)


def _settle(x: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A row of elements as long as the longer of two tensors that lie in it, which the gradient of a view has, as long
    as one of them: which one is a condition of the program. Of equal ones, that which such a view fills."""
    longest: Any = x.shape[0] if x.dim() == 1 else 0
    if not isinstance(longest, torch.SymInt) or not isinstance(longest.node.expr, Max) or not may_take_conditions():
        return x
    with disable_proxy_modes_tracing():
        env, choices = longest.node.shape_env, longest.node.expr.args
        lengths = [make_size(env, expr) for expr in choices]
        conditions = Conditions()
        needed = _reach(size, stride) + 1
        place = next(
            place
            for place, length in sorted(enumerate(lengths), key=lambda found: not known(found[1] == needed))
            if all(conditions.hold(length == other) or conditions.hold(length > other) for other in lengths)
        )
        conditions.take()
    # A condition may have said what a symbol is.
    settled: Any = make_size(env, env.replace(choices[place]))
    return _slice(x, Window((0,), (settled,), (1,), (0,)), 0)


def _order_in_memory(x: Tensor, holds: Judge) -> list[int]:
    """The axes of ``x``, the longest steps first; those of equal steps, and of which there is no telling, as they
    are."""

    def compare(one: int, other: int) -> int:
        return _compare(x.stride(other), x.stride(one), holds)

    return sorted(range(x.dim()), key=cmp_to_key(compare))


def _are_contiguous(shape: Sequence[int], stride: Sequence[int], holds: Judge) -> bool:
    """Whether a tensor of this shape and these strides has no gaps, and its last axis steps by one element."""
    return all(
        known(count == 1) or holds(step == prod(shape[axis + 1 :]))
        for axis, (count, step) in enumerate(zip(shape, stride, strict=True))
    )


def _shape_of_strides(numel: int, stride: Sequence[int]) -> tuple[int, ...]:
    """The shape of so many elements whose axes have these strides, if there is one; else that of a row."""
    steps = sorted({step for step in stride if step > 0}, reverse=True) if _are_numbers(*stride) else stride
    lengths = [numel, *steps, 1]
    if not all(known(shorter > 0) and known(longer % shorter == 0) for longer, shorter in pairwise(lengths)):
        return (numel,)
    return tuple(longer // shorter for longer, shorter in pairwise(lengths))


def _slice(x: Tensor, window: Window, axis: int) -> Tensor:
    start, count, step = window.starts[axis], window.counts[axis], window.steps[axis]
    if known(count == x.shape[axis]):
        return x
    with deciding():
        sliced: Tensor = aten.slice.Tensor(x, axis, start, _end(start, count, step), step)
    return sliced


def _end(start: int, count: int, step: int) -> int:
    """Where a slice ends. An open count is what it was where nothing is added: a sum that comes to the same would, in a
    trace, be its own operand."""
    if step != 1:
        return start + (count - 1) * step + 1
    return count if known(start == 0) else start + count


def _write(x: Tensor, values: Tensor, window: Window, axis: int) -> Tensor:
    """``x`` with ``values`` in the window, whose axes before ``axis`` have been sliced already."""
    if axis == x.dim():
        return values
    part = _write(_slice(x, window, axis), values, window, axis + 1)
    start, count, step = window.starts[axis], window.counts[axis], window.steps[axis]
    if known(count == x.shape[axis]):
        return part
    with deciding():
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
