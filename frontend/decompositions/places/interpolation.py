# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Images that are made larger or smaller by straight lines or cubic curves between their elements, axis by axis.

Along an axis each element of the result is a weighted sum of a few neighbours, its *taps*. A gradient reads in turn
which elements of the result have a tap at each element of the image, and what weight it has there. Autograd's gradient
of the forward adds up, for each element of the result, what it has for its taps. That is a scatter for each corner, and
each of these writes to the whole image.

Source: PyTorch's ``UpSample.h``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch._ops import OpOverload

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition
from retrograd.frontend.decompositions.places.grid_sample import cubic_weight, pull_back

aten = torch.ops.aten
# How far rounding moves a spot, at most: to either side of a whole number it may find other taps, without weight.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Axis:
    """How an axis of ``before`` elements is made one of ``after``: ``scale`` is what the caller gave, if anything, and
    ``ignores_scale`` says that PyTorch's kernel does not look at it where there are as many elements as before."""

    before: int
    after: int
    scale: float | None
    aligned: bool
    cubic: bool
    ignores_scale: bool = False

    @property
    def is_same(self) -> bool:
        """Whether the result is as the image is."""
        return _is_kept(self.before, self.after) and (self.aligned or self.ignores_scale or self.step == 1)

    @property
    def step(self) -> float:
        """How far two neighbours of the result are apart, in elements of the image."""
        if self.aligned:
            return (self.before - 1) / (self.after - 1) if self.after > 1 else 0.0
        return 1 / self.scale if self.scale is not None and self.scale > 0 else self.before / self.after

    def taps(self, places: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """For elements of the result at ``places``, whole numbers: what elements of the image they read, and with which
        weight."""
        spots = self._spots(places.to(dtype))
        low = spots.floor()
        share = (spots - low).clamp(0.0, 1.0)
        weights = [cubic_weight(share, k) for k in range(-1, 3)] if self.cubic else [1 - share, share]
        first = -1 if self.cubic else 0
        whole = low.to(torch.int64)
        return [((whole + k).clamp(0, self.before - 1), weight) for k, weight in enumerate(weights, first)]

    def _spots(self, places: Tensor) -> Tensor:
        spots = places * self.step if self.aligned else (places + 0.5) * self.step - 0.5
        # A line goes on beside the last element, a curve does not.
        return spots if self.cubic else spots.clamp(min=0.0)

    def readers(self) -> tuple[int, int]:
        """Where the elements of the result begin that read an element ``i`` of the image, and how many they are at
        most: from ``i * after // before - offset``, within the result. Returns ``offset`` and their number."""
        firsts, lasts = [self.after] * self.before, [-1] * self.before
        for place in range(self.after):
            for tap in self._find_taps(place):
                firsts[tap], lasts[tap] = min(firsts[tap], place), max(lasts[tap], place)
        read = [i for i in range(self.before) if lasts[i] >= 0]
        offset = max(i * self.after // self.before - firsts[i] for i in read)
        starts = {i: max(i * self.after // self.before - offset, 0) for i in read}
        return offset, min(max(lasts[i] - start + 1 for i, start in starts.items()), self.after)

    def _find_taps(self, place: int) -> set[int]:
        spot = place * self.step if self.aligned else (place + 0.5) * self.step - 0.5
        reach = range(-1, 3) if self.cubic else range(2)
        lows = {math.floor(spot - _ROUNDING), math.floor(spot + _ROUNDING)}
        return {min(max(low + k, 0), self.before - 1) for low in lows for k in reach}


def interpolate(
    x: Tensor, output_size: Sequence[int], aligned: bool, *scales: float | None, cubic: bool = False
) -> Tensor:
    """``x [N, C, *sizes]`` resized to ``[N, C, *output_size]``."""
    if not x.is_floating_point():
        return NotImplemented
    wide = _widened(x.dtype)
    out = x.to(wide)
    axes = _axes(x.device, x.shape[2:], output_size, aligned, scales, cubic, of_gradient=False)
    for number, axis in _cheapest_first(axes):
        if axis.is_same:
            continue
        places = torch.arange(axis.after, device=x.device)
        terms = [
            out.index_select(number, place) * _along(weight, number, out.dim())
            for place, weight in axis.taps(places, wide)
        ]
        out = _add(terms)
    return out.to(x.dtype) if out is not x else x.clone()


def interpolation_gradient(
    grad: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    aligned: bool,
    *scales: float | None,
    cubic: bool = False,
) -> Tensor:
    """The gradient of an input of ``input_size [N, C, *sizes]`` resized to ``[N, C, *output_size]``."""
    if not all(isinstance(size, int) for size in (*output_size, *input_size[2:])):
        # Open sizes: how many read an element is not known.
        image = grad.new_empty(list(input_size))
        return pull_back(lambda x: interpolate(x, output_size, aligned, *scales, cubic=cubic), [image], grad)[0]
    wide = _widened(grad.dtype)
    out = grad.to(wide)
    axes = _axes(grad.device, input_size[2:], output_size, aligned, scales, cubic, of_gradient=True)
    # As the forward went, and back.
    for number, axis in reversed(_cheapest_first(axes)):
        if not axis.is_same:
            out = _gather_readers(out, number, axis, wide)
    return out.to(grad.dtype) if out is not grad else grad.clone()


def _gather_readers(grad: Tensor, number: int, axis: Axis, wide: torch.dtype) -> Tensor:
    """The gradient along one axis."""
    offset, count = axis.readers()
    image = torch.arange(axis.before, device=grad.device)
    starts = (torch.div(image * axis.after, axis.before, rounding_mode="floor") - offset).clamp(0, axis.after - count)
    # [elements of the image, readers]
    readers = starts.unsqueeze(1) + torch.arange(count, device=grad.device)
    taps = axis.taps(readers, wide)
    hits = [place == image.unsqueeze(1) for place, _ in taps]
    weights = _add([torch.where(hit, weight, 0.0) for hit, (_, weight) in zip(hits, taps, strict=True)])
    reads = hits[0]
    for hit in hits[1:]:
        reads = reads | hit
    zero = torch.zeros((), dtype=wide, device=grad.device)
    # What is not read stays out, whatever it is: 0 times infinity would be no number.
    read = grad.index_select(number, readers.flatten()).unflatten(number, (axis.before, count))
    shape = [axis.before, count, *[1] * (grad.dim() - number - 1)]
    return torch.where(reads.reshape(shape), read * weights.reshape(shape), zero).sum(number + 1)


def _is_kept(before: int, after: int) -> bool:
    """Whether there are as many elements as before. Open sizes are not compared, which would close them."""
    return isinstance(before, int) and isinstance(after, int) and before == after


def _axes(
    device: torch.device,
    before: Sequence[int],
    after: Sequence[int],
    aligned: bool,
    scales: Sequence[float | None],
    cubic: bool,
    *,
    of_gradient: bool,
) -> list[tuple[int, Axis]]:
    given = scales or (None,) * len(after)
    # Of curves that is so of gradients alone, on the CPU.
    is_whole = all(map(_is_kept, before, after))
    ignores_scale = (is_whole and (of_gradient or device.type != "cpu")) or (device.type == "cpu" and not cubic)
    return [
        (number, Axis(old, new, scale, aligned, cubic, ignores_scale))
        for number, (old, new, scale) in enumerate(zip(before, after, given, strict=True), 2)
    ]


def _cheapest_first(axes: Sequence[tuple[int, Axis]]) -> list[tuple[int, Axis]]:
    """The order that leaves the smallest images in between: of open sizes, as they come."""
    if not all(isinstance(size, int) for _, axis in axes for size in (axis.before, axis.after)):
        return [*axes]
    return sorted(axes, key=lambda item: item[1].after / item[1].before)


def _along(values: Tensor, number: int, rank: int) -> Tensor:
    return values.reshape([-1, *[1] * (rank - number - 1)])


def _add(terms: Sequence[Tensor]) -> Tensor:
    return [*itertools.accumulate(terms, torch.add)][-1]


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _entries(op: OpOverload, backward: OpOverload, cubic: bool) -> tuple[Decomposition, Decomposition]:
    forward: Callable[..., Tensor] = partial(interpolate, cubic=cubic)
    gradient: Callable[..., Tensor] = partial(interpolation_gradient, cubic=cubic)
    reason = "PyTorch's form reads all corners of each element, and its gradient is a scatter for each corner"
    return Decomposition(op, forward, reason), Decomposition(backward, gradient, NO_LOWERING)


ENTRIES = (
    *_entries(aten.upsample_linear1d.default, aten.upsample_linear1d_backward.default, False),
    *_entries(aten.upsample_bilinear2d.default, aten.upsample_bilinear2d_backward.default, False),
    *_entries(aten.upsample_trilinear3d.default, aten.upsample_trilinear3d_backward.default, False),
    *_entries(aten.upsample_bicubic2d.default, aten.upsample_bicubic2d_backward.default, True),
)
