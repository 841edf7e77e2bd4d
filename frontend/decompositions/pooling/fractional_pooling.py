# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Fractional max pooling: windows at places that random numbers choose.

Source: Graham, "Fractional max-pooling" (2014); PyTorch's ``FractionalMaxPool2d.cpp``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition

aten = torch.ops.aten


def fractional_max_pool(
    x: Tensor, kernel: Sequence[int], output: Sequence[int], samples: Tensor
) -> tuple[Tensor, Tensor]:
    """``aten.fractional_max_pool2d`` and ``_3d``: the largest of each window ``[..., c, *output]``, and its place in
    the flattened image (int64). ``samples [n, c, axes]`` are in [0, 1), for the last axis first."""
    rank = len(kernel)
    image = x if x.dim() == rank + 2 else x.unsqueeze(0)
    sizes = image.shape[2:]
    columns = range(rank) if rank == 3 else reversed(range(rank))
    starts = [
        _starts(samples[..., column], size, window, out)
        for column, size, window, out in zip(columns, sizes, kernel, output, strict=True)
    ]
    flat = image.flatten(2)
    values, places = [], []
    for step in itertools.product(*map(range, kernel)):
        place = torch.zeros((), dtype=torch.int64, device=x.device)
        for axis, (start, size, offset) in enumerate(zip(starts, sizes, step, strict=True)):
            shape = [*start.shape[:2], *[1] * axis, start.shape[2], *[1] * (rank - 1 - axis)]
            place = place * size + (start + offset).reshape(shape)
        places.append(place)
        values.append(flat.gather(2, place.flatten(2)).reshape(place.shape))
    best, at = values[0], places[0]
    for value, place in zip(values[1:], places[1:], strict=True):
        # NaN stays; of equal ones the first.
        later = (value > best) | torch.isnan(value)
        best, at = torch.where(later, value, best), torch.where(later, place, at)
    return (best, at) if x.dim() == rank + 2 else (best.squeeze(0), at.squeeze(0))


def fractional_max_pool_backward(
    grad: Tensor, x: Tensor, kernel: Sequence[int], output: Sequence[int], indices: Tensor
) -> Tensor:
    """``aten.fractional_max_pool2d_backward`` and ``_3d``: ``grad`` added up at the places of the largest."""
    rank = len(kernel)
    flat = x.new_zeros(x.shape).flatten(-rank)
    return flat.scatter_add(-1, indices.flatten(-rank), grad.flatten(-rank)).reshape(x.shape)


def _starts(sample: Tensor, size: int, window: int, output: int) -> Tensor:
    """``[n, c, output]``: where along an axis each window begins."""
    last = torch.full_like(sample, size - window, dtype=torch.int64).unsqueeze(-1)
    if output == 1:
        return last
    alpha = (size - window) / (output - 1)
    number = torch.arange(output - 1, device=sample.device)
    shift = sample.unsqueeze(-1)
    places = ((number + shift) * alpha).to(torch.int64) - (shift * alpha).to(torch.int64)
    return torch.cat([places, last], -1)


ENTRIES = tuple(
    Decomposition(op, function, NO_LOWERING)
    for op, function in (
        (aten.fractional_max_pool2d.default, fractional_max_pool),
        (aten.fractional_max_pool3d.default, fractional_max_pool),
        (aten.fractional_max_pool2d_backward.default, fractional_max_pool_backward),
        (aten.fractional_max_pool3d_backward.default, fractional_max_pool_backward),
    )
)
