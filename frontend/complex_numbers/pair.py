# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A complex tensor as two real ones, and arithmetic on such pairs, in torch's ops on real tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

REAL_DTYPES = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}


@dataclass(frozen=True)
class Pair:
    """The real and the imaginary part of a complex tensor: of its shape, and of the dtype of its parts."""

    re: Tensor
    im: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Pair:
        """``function``, which is linear over the real numbers, of each part."""
        return Pair(function(self.re), function(self.im))

    def conj(self) -> Pair:
        """The complex conjugate."""
        return Pair(self.re, -self.im)

    def turned(self) -> Pair:
        """The product with the imaginary unit."""
        return Pair(-self.im, self.re)

    def __neg__(self) -> Pair:
        return Pair(-self.re, -self.im)


# What stands for a number in an op on complex tensors.
Value: TypeAlias = "Pair | Tensor | complex"


def is_complex(value: Any) -> bool:
    """Whether a value is a pair or a complex number."""
    return isinstance(value, (Pair, complex))


def parts(value: Value) -> tuple[Any, Any]:
    """The real and the imaginary part, tensors or numbers."""
    if isinstance(value, Pair):
        return value.re, value.im
    if isinstance(value, Tensor):
        return value, torch.zeros_like(value)
    return (value.real, value.imag) if isinstance(value, complex) else (value, 0)


def as_pair(value: Value, like: Tensor) -> Pair:
    """A value as a pair; numbers as tensors of no axis, of the dtype and device of ``like``."""
    re, im = parts(value)
    if isinstance(re, Tensor):
        return Pair(re, im)
    dtype = like.dtype if like.dtype.is_floating_point else torch.get_default_dtype()
    return Pair(*(torch.full((), part, dtype=dtype, device=like.device) for part in (re, im)))


def multiply(x: Value, y: Value, op: Callable[[Any, Any], Any] = torch.mul) -> Pair:
    """The product of two values, at least one of them complex; or what ``op``, linear in each of the two, makes of
    them."""
    if not is_complex(x):
        return Pair(*(op(x, part) for part in parts(y)))
    if not is_complex(y):
        return Pair(*(op(part, y) for part in parts(x)))
    (a, b), (c, d) = parts(x), parts(y)
    return Pair(op(a, c) - op(b, d), op(a, d) + op(b, c))


def add(x: Value, y: Value) -> Pair:
    """The sum of two values, at least one of them complex."""
    (a, b), (c, d) = parts(x), parts(y)
    return Pair(a + c, b + d)


def subtract(x: Value, y: Value) -> Pair:
    """The difference of two values, at least one of them complex."""
    (a, b), (c, d) = parts(x), parts(y)
    return Pair(a - c, b - d)


def divide(x: Value, y: Value) -> Pair:
    """The quotient of two values, at least one of them complex. Both are scaled by the larger part of the divisor, so
    that no square overflows or vanishes."""
    if not is_complex(y):
        return Pair(*(part / y for part in parts(x)))
    if not isinstance(y, Pair):
        c, d = parts(y)
        return multiply(x, 1 / complex(c, d))
    scale = torch.maximum(y.re.abs(), y.im.abs())
    c, d = y.re / scale, y.im / scale
    length = c * c + d * d
    if isinstance(x, complex):
        x = Pair(x.real / scale, x.imag / scale)
    else:
        x = x.map(lambda part: part / scale) if isinstance(x, Pair) else x / scale
    return multiply(x, Pair(c, -d)).map(lambda part: part / length)


def absolute(x: Pair) -> Tensor:
    """The absolute values, which are found without squares that overflow or vanish."""
    a, b = x.re.abs(), x.im.abs()
    larger, smaller = torch.maximum(a, b), torch.minimum(a, b)
    # Zeros and infinities are equal as well.
    ratio = torch.where(larger == smaller, 1.0, smaller / larger)
    return larger * torch.sqrt(1 + ratio * ratio)
