# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Fourier transforms of pairs: what of ``torch.fft`` reaches a traced graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from retrograd.frontend.complex_numbers.dft import half_counts, transform
from retrograd.frontend.complex_numbers.pair import Pair

aten = torch.ops.aten

# Parts of these types are transformed; ATen's numbers for what the result is divided by.
_TYPES = (torch.float32, torch.float64)
_BY_ROOT, _BY_SIZE = 1, 2


def complex_to_complex(x: Pair, axes: Sequence[int], normalization: int, forward: bool) -> Any:
    """``aten._fft_c2c``: along each axis."""
    if not _is_able(x.re, axes):
        return NotImplemented
    for axis in axes:
        x = _along(x, axis, x.re.shape[axis], inverse=not forward)
    return _scaled(x, [x.re.shape[axis] for axis in axes], normalization)


def real_to_complex(x: Tensor, axes: Sequence[int], normalization: int, onesided: bool) -> Any:
    """``aten._fft_r2c``: the last axis first, of whose result the first half and one is all if ``onesided``."""
    if not _is_able(x, axes):
        return NotImplemented
    sizes = [x.shape[axis] for axis in axes]
    *others, last = axes
    result = _along(x, last, sizes[-1], inverse=False, wanted=sizes[-1] // 2 + 1 if onesided else None)
    for axis in others:
        result = _along(result, axis, x.shape[axis], inverse=False)
    return _scaled(result, sizes, normalization)


def complex_to_real(x: Pair, axes: Sequence[int], normalization: int, size: int) -> Any:
    """``aten._fft_c2r``: inverse, the last axis last, whose ``size`` real elements come from half of a spectrum.

    The other half is the conjugate of this one: each element counts twice but the first and, of an even size, the one
    in the middle, which have no partner and of which the imaginary part does not count.
    """
    half = size // 2 + 1
    if not _is_able(x.re, axes) or x.re.shape[axes[-1]] < half:
        return NotImplemented
    sizes = [*(x.re.shape[axis] for axis in axes[:-1]), size]
    *others, last = axes
    for axis in others:
        x = _along(x, axis, x.re.shape[axis], inverse=True)
    counts = half_counts(size, x.re.dtype, x.re.device)
    spectrum = x.map(lambda t: t.movedim(last, -1)[..., :half] * counts)
    result = transform(spectrum, size, inverse=True).re.movedim(-1, last)
    factor = _factor(sizes, normalization)
    return result if factor == 1 else result * factor


def _along(x: Pair | Tensor, axis: int, size: int, *, inverse: bool, wanted: int | None = None) -> Pair:
    def to_end(t: Tensor) -> Tensor:
        return t.movedim(axis, -1)

    moved = x.map(to_end) if isinstance(x, Pair) else to_end(x)
    return transform(moved, size, inverse=inverse, wanted=wanted).map(lambda t: t.movedim(-1, axis))


def _scaled(x: Pair, sizes: Sequence[int], normalization: int) -> Pair:
    factor = _factor(sizes, normalization)
    return x if factor == 1 else x.map(lambda t: t * factor)


def _factor(sizes: Sequence[int], normalization: int) -> float:
    count = math.prod(sizes)
    return {_BY_ROOT: 1 / math.sqrt(count), _BY_SIZE: 1 / count}.get(normalization, 1)


def _is_able(x: Tensor, axes: Sequence[int]) -> bool:
    """Whether tensors of this type are transformed, along axes whose sizes are numbers."""
    return x.dtype in _TYPES and all(isinstance(x.shape[axis], int) for axis in axes)


RULES: dict[OpOverload, Callable[..., Any]] = {
    aten._fft_c2c.default: complex_to_complex,
    aten._fft_r2c.default: real_to_complex,
    aten._fft_c2r.default: complex_to_real,
}
