# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How far one tensor is from another, in float64, piece by piece: copies of whole results in float64 took longer than
the step that gave them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from retrograd.frontend.verification.first_comparison import to_double

# The largest error of one element, over the largest element, counts as this much less than that of the norm.
_OF_LARGEST = 0.1
# Elements of a piece, which is in a core's cache.
_PIECE = 1 << 17


@dataclass
class _Sums:
    """Holds the sum of squares and the largest magnitude of what was added up."""

    squares: float = 0.0
    largest: float = 0.0

    def add(self, numbers: Tensor) -> bool:
        """Add numbers in float64; says whether they are finite, and their squares too."""
        flat = numbers.reshape(-1)
        if not flat.numel():
            return True
        squares = float(torch.dot(flat, flat))
        self.squares += squares
        self.largest = max(self.largest, float(torch.linalg.vector_norm(flat, math.inf)))
        return math.isfinite(squares)

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)


def error_of(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """The relative error: norm of the difference over the norm of ``expected``, or ``floor`` if that is larger, or the
    same of the largest elements, which count less, unless squares are too large to be added up; infinite if shapes
    differ, or if infinities or NaNs are in other places."""
    if found is expected:
        return 0.0
    if found.shape != expected.shape:
        return math.inf
    off, size = _Sums(), _Sums()
    for a, b in _pieces(found, expected):
        difference = a - b
        if not math.isfinite(float(difference.sum())):
            same = (a == b) | (a.isnan() & b.isnan())
            finite = a.isfinite() & b.isfinite()
            if not bool((finite | same).all()):
                return math.inf
            difference, b = difference[finite], b[finite]
        off.add(difference)
        size.add(b)
    if off.squares == 0.0:
        return 0.0
    least = max(floor, 1e-300)
    if not math.isfinite(off.squares + size.squares):
        return off.largest / max(size.largest, least)
    return max(off.norm / max(size.norm, least), _OF_LARGEST * off.largest / max(size.largest, least))


def norms_of_finite(found: Tensor, expected: Tensor) -> tuple[float, float] | None:
    """The norm of the difference of two tensors of one shape, and that of ``expected``; None where an element, or the
    sum of the squares, is not finite."""
    off, size = _Sums(), _Sums()
    for a, b in _pieces(found, expected):
        if not (off.add(a - b) and size.add(b)):
            return None
    return (off.norm, size.norm) if math.isfinite(off.squares + size.squares) else None


def norm_of(tensor: Tensor) -> float:
    """The norm, in float64."""
    size = _Sums()
    for (numbers,) in _pieces(tensor):
        size.add(numbers)
    return size.norm


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same elements of tensors of one shape, as float64; complex ones as pairs."""
    plain = [t.detach() for t in tensors]
    flat = [t.reshape(-1) for t in _in_order(plain)]
    step = _PIECE if plain[0].device.type == "cpu" else max(plain[0].numel(), 1)
    for start in range(0, plain[0].numel(), step):
        yield tuple(to_double(t[start : start + step]) for t in flat)


def _in_order(tensors: list[Tensor]) -> list[Tensor]:
    """The axes of all of them in the order in which the first has them in memory, if they lie alike: flattening copies
    nothing then."""
    first = tensors[0]
    if any(t.stride() != first.stride() for t in tensors) or first.is_contiguous():
        return tensors
    axes = sorted(range(first.dim()), key=first.stride, reverse=True)
    return [t.permute(axes) for t in tensors]
