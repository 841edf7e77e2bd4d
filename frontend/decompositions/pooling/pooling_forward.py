# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pooling itself, of batches, over planes and volumes that its windows fill.

Along an axis of one window, elements that no window reaches make IREE's kernel disagree with itself about the axis'
length. They are left out before, as what ceil mode adds is put there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.convolutions.windows import Window, along, spread_axes
from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.decompositions.pooling.pooling_gradients import window_lengths
from retrograd.frontend.decompositions.sums import HALF, ROUNDED

aten = torch.ops.aten

# Whether the places of the max_pool at hand are looked at by its caller.
_MENDED = ContextVar("_MENDED", default=False)


def max_pool(
    op: Callable[..., Any],
    rank: int,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    ceil_mode: bool = False,
) -> Any:
    """``aten.max_pool{rank}d_with_indices``: ``x [N, C, *spatial]`` or ``[C, *spatial]`` to the maxima and their places
    in the flattened plane. The padding is minus infinity too: of a window of nothing else, the place is found here."""
    window = Window.of(spread_axes(kernel_size, rank), stride, padding or (0,), dilation or (1,))
    whole = (window.kernel, window.stride, window.padding, window.dilation)
    if x.dim() == rank + 1:
        y, places = op(x.unsqueeze(0), *whole, ceil_mode)
        return y.squeeze(0), places.squeeze(0)
    if is_short(rank, kernel_size, stride, padding, dilation):
        return op(x, *whole, ceil_mode)
    beyond = find_misfit(window, x.shape[2:], ceil_mode)
    if not x.is_floating_point():
        return NotImplemented
    if beyond is not None:
        filled = _fill(x, window.padding, beyond, -math.inf)
        y, places = op(filled, window.kernel, window.stride, [0] * rank, window.dilation)
        places = _places_before(places, window.padding, filled.shape[2:], x.shape[2:])
    elif _MENDED.get() or not any(window.padding):
        return NotImplemented
    else:
        token = _MENDED.set(True)
        try:
            y, places = op(x, *whole, ceil_mode)
        finally:
            _MENDED.reset(token)
    if not any(window.padding):
        return y, places
    return y, torch.where(y == -math.inf, _first_places(y, window, x.shape[2:]), places)


def avg_pool(
    op: Callable[..., Any],
    rank: int,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | None = None,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """``aten.avg_pool{rank}d``: ``x [N, C, *spatial]`` or ``[C, *spatial]`` to the means of its windows; half types are
    added up in f32."""
    window = Window.of(spread_axes(kernel_size, rank), stride, padding or (0,), [1])
    options = (window.kernel, window.stride, window.padding, ceil_mode, count_include_pad, divisor_override)
    if x.dim() == rank + 1:
        return op(x.unsqueeze(0), *options).squeeze(0)
    if x.dtype in HALF:
        return op(x.float(), *options).to(x.dtype)
    if is_short(rank, kernel_size, stride, padding):
        return op(x, *options)
    beyond = find_misfit(window, x.shape[2:], ceil_mode)
    if beyond is None:
        return NotImplemented
    filled = _fill(x, window.padding, beyond, 0)
    y = op(filled, window.kernel, window.stride, [0] * rank, False, True, 1)
    if divisor_override is not None:
        return y / divisor_override
    for axis in range(rank):
        y = y / window_lengths(window.axis(axis), y, axis - rank, x.shape[2 + axis], count_include_pad)
    return y


def is_short(rank: int, *given: Sequence[int] | None) -> bool:
    """Whether one number was given that stands for all axes. What was left out, None or empty, is not: of that the op
    has a default."""
    return any(value and len(value) < rank for value in given)


def find_misfit(window: Window, size: Sequence[int], ceil_mode: bool) -> list[int] | None:
    """How many elements to add behind each axis, and if negative to leave out, for the windows to end where it does;
    None where they do, where no axis is of one window, and for open sizes."""
    if not all(isinstance(length, int) for length in size):
        return None
    beyond, misfit = [], False
    for length, kernel, stride, padding, dilation in zip(
        size, window.kernel, window.stride, window.padding, window.dilation, strict=True
    ):
        reach = dilation * (kernel - 1) + 1
        steps, rest = divmod(length + 2 * padding - reach, stride)
        # In ceil mode a window may end behind the padding, but not start there.
        if ceil_mode and rest and (steps + 1) * stride < length + padding:
            steps += 1
        end = steps * stride + reach
        misfit |= steps == 0 and (ceil_mode or end != length + 2 * padding)
        beyond.append(end - padding - length)
    return beyond if misfit else None


def _fill(x: Tensor, before: Sequence[int], behind: Sequence[int], value: float) -> Tensor:
    pairs = [amount for pair in zip(reversed(before), reversed(behind), strict=True) for amount in pair]
    filled: Tensor = aten.constant_pad_nd.default(x, pairs, value) if any(pairs) else x
    return filled


def _first_places(y: Tensor, window: Window, size: Sequence[int]) -> Tensor:
    """``[*out]``, int64: the place in the flattened ``[*size]`` of the first element of each window, padding not
    counted."""
    places: Tensor | None = None
    for axis, length in enumerate(size):
        dim = axis - window.rank
        start = torch.arange(y.shape[dim], device=y.device) * window.stride[axis] - window.padding[axis]
        dilation = window.dilation[axis]
        # What is left of a step of the dilation, of places in front of the first.
        start = torch.where(start < 0, torch.remainder(start, dilation), start)
        places = along(start, dim) if places is None else places * length + along(start, dim)
    assert places is not None, "a plane has at least one axis"
    return places


def _places_before(places: Tensor, before: Sequence[int], filled: Sequence[int], size: Sequence[int]) -> Tensor:
    """Places in a plane that was filled up as those in the plane before."""
    coordinates = []
    for length in reversed(filled):
        coordinates.append(torch.remainder(places, length))
        places = torch.div(places, length, rounding_mode="floor")
    flat: Tensor | None = None
    for coordinate, low, length in zip(reversed(coordinates), before, size, strict=True):
        # Of nothing but the fill it is some element: the caller knows such windows by their maximum.
        own = (coordinate - low).clamp(min=0)
        flat = own if flat is None else flat * length + own
    assert flat is not None, "a plane has at least one axis"
    return flat


_BATCH = (
    "torch-mlir refuses it without a batch axis, and ends the process if one number stands for all axes; IREE refuses "
    "some with a single window"
)

ENTRIES = (
    *(
        Decomposition(op, partial(max_pool, op, rank), _BATCH)
        for op, rank in ((aten.max_pool2d_with_indices.default, 2), (aten.max_pool3d_with_indices.default, 3))
    ),
    *(
        Decomposition(op, partial(avg_pool, op, rank), f"{ROUNDED}; {_BATCH}")
        for op, rank in ((aten.avg_pool2d.default, 2), (aten.avg_pool3d.default, 3))
    ),
)
