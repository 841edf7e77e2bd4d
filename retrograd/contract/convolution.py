# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which convolutions kernels of our own compute: a trace keeps these whole, and a conversion takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONVOLUTION = "torch.retrograd.convolution_last"
"""The op of a call in imported IR, of images with channels last."""
IMAGES, FILTERS = f"{CONVOLUTION}_images", f"{CONVOLUTION}_filters"
"""The ops of the gradients of images and filters."""

ELEMENTS = ("f32", "bf16", "f16")
"""Types of elements that there are kernels for, as MLIR spells them."""

FEWEST = 1 << 20
"""Multiplications below which a convolution is left to iree-compile."""
NARROWEST = 4
"""Groups of fewer channels are: a tile is of 16."""

# Numbers that say where something lies in a tensor have 32 bits, and an axis of a grid 16.
_MOST_ELEMENTS, _MOST_PROGRAMS = 1 << 31, 65535

Tensor = tuple[str, tuple[int | None, ...]]
"""A type of elements, and a shape in which an open size is ``None``."""


def count_windows(size: int, taps: int, stride: int, padding: int, dilation: int) -> int:
    """How many places a window of so many taps has along an axis of ``size`` elements, padded at both ends."""
    return (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1


@dataclass(frozen=True)
class Convolution:
    """Images N x G C x H x W, filters G O x C x R x S and results N x G O x P x Q, for G ``groups`` of channels. Of a
    transposed convolution the images are what it gives. A window has a stride, a padding and a dilation for each axis.
    """

    images: Tensor
    filters: Tensor
    results: Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of_last(
        cls,
        images: Tensor,
        filters: Tensor,
        results: Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
    ) -> Convolution:
        """The convolution of tensors whose channels come last, four axes each."""
        planes = [(element, (shape[0], shape[3], *shape[1:3])) for element, shape in (images, filters, results)]
        (_, (_, channels, *_)), (_, (_, depth, *_)), _ = planes
        groups = (channels or 1) // (depth or 1)
        return cls(planes[0], planes[1], planes[2], tuple(stride), tuple(padding), tuple(dilation), max(groups, 1))

    def find_obstacle(self) -> str | None:
        """Why kernels of ours do not compute it; ``None`` where they do."""
        tensors = (self.images, self.filters, self.results)
        elements = {element for element, _ in tensors}
        if any(len(shape) != 4 for _, shape in tensors):
            return "it is not of images"
        sizes = [tuple(size for size in shape if size is not None) for _, shape in tensors]
        if any(len(shape) != 4 for shape in sizes):
            return "sizes are open"
        if elements - {*ELEMENTS} or len(elements) > 1:
            return f"it is of {' and '.join(sorted(elements))}"
        counts = [math.prod(shape) for shape in sizes]
        if not all(counts) or max(counts) >= _MOST_ELEMENTS:
            return "a tensor is empty, or too large"
        if any(s > 1 and d > 1 for s, d in zip(self.stride, self.dilation, strict=True)):
            return "it has a stride and a dilation along one axis"
        _, filters, results = sizes
        narrowest = min(filters[1], filters[0] // self.groups)
        if self.groups > 1 and narrowest < NARROWEST:
            return f"groups are of {narrowest} channels"
        count = math.prod(results) * math.prod(filters[1:])
        if count < FEWEST:
            return f"of {count} multiplications it is too small"
        return "a grid is too large" if max(self.groups, math.prod(self.stride)) > _MOST_PROGRAMS else None
