# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Discrete Fourier transforms as products with small matrices of constants.

A transform of n = n1 * n2 points is n2 transforms of n1, a factor for each element, and n1 transforms of n2, so that
the work is in proportion to n times the sum of the factors (Cooley and Tukey, *An algorithm for the machine calculation
of complex Fourier series*, 1965). Where a factor is a large prime, it becomes a convolution, which transforms of a
power of two compute (Bluestein, *A linear filtering approach to the computation of discrete Fourier transform*, 1970).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from retrograd.frontend.complex_numbers.pair import Pair, multiply

# Sizes up to this one are one product with a matrix.
LARGEST_MATRIX = 64
# Those of prime size too, up to this one. A larger prime is worth a convolution.
LARGEST_PRIME = 256


def transform(x: Pair | Tensor, n: int, *, inverse: bool, wanted: int | None = None) -> Pair:
    """The unscaled transform of ``n`` points along the last axis: the sum over j of x[j] * exp(-+ 2 pi i j k / n).

    ``x`` may be a real tensor. It has ``n`` elements along that axis, or less, which zeros follow. Of the result, the
    first ``wanted`` elements are worked out, or all.
    """
    given, wanted = _length(x), n if wanted is None else wanted
    first = find_factor(n)
    if first == n:
        return (_convolve if n > LARGEST_PRIME else _multiply)(x, n, wanted, inverse)
    # Elements of x are numbered by rows of second, those of the result by columns of first.
    second = n // first
    rows, columns = -(-given // second), -(-wanted // first)
    x = _map(x, lambda t: _extend(t, rows * second).unflatten(-1, (rows, second)).transpose(-1, -2))
    inner = transform(x, first, inverse=inverse)
    turned = multiply(inner, _roots(n, second, first, inverse, *_kind(x))).map(lambda t: t.transpose(-1, -2))
    outer = transform(turned, second, inverse=inverse, wanted=columns)
    return outer.map(lambda t: t.transpose(-1, -2).flatten(-2)[..., :wanted])


def find_factor(n: int) -> int:
    """The size of the matrices that a transform of ``n`` points begins with: the divisor next to the square root among
    those that are small enough, or ``n`` where that is best or has no other divisor."""
    if n <= LARGEST_MATRIX:
        return n
    divisors = [d for d in range(2, math.isqrt(n) + 1) if n % d == 0]
    small = [d for d in (*divisors, *(n // d for d in divisors)) if d <= LARGEST_MATRIX]
    # What is left has to be transformed as well: in as few steps as it takes.
    return max(small, key=lambda d: (-abs(math.log(d * d / n)), d), default=divisors[0] if divisors else n)


def _multiply(x: Pair | Tensor, n: int, wanted: int, inverse: bool) -> Pair:
    """Multiply by a matrix."""
    sizes = (x.re if isinstance(x, Pair) else x).shape
    matrix = _roots(n, sizes[-1], wanted, inverse, *_kind(x))
    product = multiply(_map(x, lambda t: t.reshape(-1, sizes[-1])), matrix, torch.mm)
    return product.map(lambda t: t.reshape(*sizes[:-1], wanted))


def _convolve(x: Pair | Tensor, n: int, wanted: int, inverse: bool) -> Pair:
    """Compute a transform as a convolution with a chirp, since j * k = (j**2 + k**2 - (k - j)**2) / 2."""
    given = _length(x)
    points = 1 << (given + wanted - 2).bit_length()
    chirp, spectrum = _chirp(n, given, wanted, points, inverse, *_kind(x))
    inner = transform(multiply(x, chirp.map(lambda t: t[:given])), points, inverse=False)
    outer = transform(multiply(inner, spectrum), points, inverse=True, wanted=wanted)
    return multiply(outer, chirp.map(lambda t: t[:wanted]))


def _length(x: Pair | Tensor) -> int:
    return int((x.re if isinstance(x, Pair) else x).shape[-1])


def _kind(x: Pair | Tensor) -> tuple[torch.dtype, torch.device]:
    tensor = x.re if isinstance(x, Pair) else x
    return tensor.dtype, tensor.device


def _map(x: Pair | Tensor, function: Callable[[Tensor], Tensor]) -> Pair | Tensor:
    return x.map(function) if isinstance(x, Pair) else function(x)


def _extend(x: Tensor, length: int) -> Tensor:
    missing = length - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


# -- Constants, worked out in float64, the same tensors each time ---------------------------------------------------


def _count(end: int) -> Tensor:
    return torch.arange(end, device="cpu")


@lru_cache(maxsize=64)
def _circle(n: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of 2 pi k / n for each k < n; exact where they are 0, 1 or -1."""
    angles = torch.arange(n, dtype=torch.float64, device="cpu") * (2 * math.pi / n)
    cosine, sine = angles.cos(), angles.sin()
    for quarter, (c, s) in enumerate(((1, 0), (0, 1), (-1, 0), (0, -1))):
        if quarter * n % 4 == 0:
            cosine[quarter * n // 4], sine[quarter * n // 4] = c, s
    return cosine, sine


def _powers(n: int, exponents: Tensor, inverse: bool) -> Pair:
    """exp(-+ 2 pi i / n) to whole powers."""
    cosine, sine = _circle(n)
    places = exponents % n
    return Pair(cosine[places], sine[places] if inverse else -sine[places])


@lru_cache(maxsize=256)
def _roots(n: int, rows: int, columns: int, inverse: bool, dtype: torch.dtype, device: torch.device) -> Pair:
    """exp(-+ 2 pi i j k / n) for each row j and column k."""
    with _disable_current_modes():
        powers = _powers(n, _count(rows).unsqueeze(1) * _count(columns), inverse)
        return powers.map(lambda t: t.to(device, dtype))


@lru_cache(maxsize=64)
def _chirp(
    n: int, given: int, wanted: int, points: int, inverse: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Pair, Pair]:
    """exp(-+ pi i j**2 / n) for each j, and the spectrum of its inverse at the distances from one of ``given`` places
    to one of ``wanted``, of ``points`` points and divided by them."""
    with _disable_current_modes():
        chirp = _powers(2 * n, _count(max(given, wanted)) ** 2, inverse)
        kernel = torch.zeros(points, dtype=torch.complex128, device="cpu")
        values = torch.complex(chirp.re, -chirp.im)
        kernel[:wanted] = values[:wanted]
        kernel[points - given + 1 :] = values[1:given].flip(0)
        spectrum = torch.fft.fft(kernel) / points
        return chirp.map(lambda t: t.to(device, dtype)), Pair(
            spectrum.real.to(device, dtype), spectrum.imag.to(device, dtype)
        )


@lru_cache(maxsize=64)
def half_counts(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """How often each element of half of a Hermitian spectrum of ``size`` elements is in the whole of it: twice, or once
    where it is its own conjugate."""
    with _disable_current_modes():
        counts = torch.full((size // 2 + 1,), 2.0, dtype=dtype, device=device)
        counts[0] = 1
        if size % 2 == 0:
            counts[-1] = 1
        return counts


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
