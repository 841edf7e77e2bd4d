# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions of single numbers, to the precision of their type from f16 to f64, where IREE or torch-mlir has none for a
type, or fewer digits than the type."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition, from_pytorch

aten = torch.ops.aten


# -- Chebyshev series --------------------------------------------------------------------------------------------------

# For functions that have no closed form. They are fitted, when this module is imported, to PyTorch's own f64 function
# on each piece of its domain: there are no tables of digits here that could hold a mistake.
Series = tuple[float, ...]


def fit(function: Callable[[Tensor], Tensor], terms: int) -> Series:
    """Coefficients of the Chebyshev series of ``function`` on [-1, 1], by interpolation at its nodes in f64."""
    angles = (torch.arange(terms, dtype=torch.float64, device="cpu") + 0.5) * (math.pi / terms)
    values = function(torch.cos(angles))
    waves = torch.cos(torch.arange(terms, dtype=torch.float64, device="cpu").unsqueeze(-1) * angles)
    coefficients = (waves @ values) * (2 / terms)
    coefficients[0] /= 2
    return tuple(coefficients.tolist())


def evaluate(series: Series, x: Tensor) -> Tensor:
    """The series at ``x`` in [-1, 1], by Clenshaw's recurrence; terms below the type's precision are left out."""
    least = torch.finfo(x.dtype).eps / 64 * max(abs(c) for c in series)
    kept = list(series)
    while len(kept) > 2 and abs(kept[-1]) < least:
        kept.pop()
    last, beyond = torch.full_like(x, kept[-1]), torch.zeros_like(x)
    for coefficient in reversed(kept[1:-1]):
        last, beyond = 2 * x * last - beyond + coefficient, last
    return x * last - beyond + kept[0]


def in_full(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Half types are computed in f32, integers as in eager in f32 too."""

    @wraps(function)
    def checked(x: Tensor, *args: Any) -> Any:
        if x.dtype in (torch.float32, torch.float64):
            return function(x, *args)
        half = x.dtype in (torch.bfloat16, torch.float16)
        return function(x.float(), *args).to(x.dtype if half else torch.float32)

    return checked


# -- Elementary functions and signs ------------------------------------------------------------------------------------

_HALF_PI = Fraction("1.57079632679489661923132169163975144209858469968755")


def _split(value: Fraction, bits: int, parts: int) -> tuple[float, ...]:
    """``value`` in [1, 2) as a sum of numbers of ``bits`` bits each, and of a last one of f64's precision."""
    found = []
    for part in range(1, parts + 1):
        unit = Fraction(1, 2 ** (bits * part - 1))
        found.append(float(value // unit * unit))
        value -= Fraction(found[-1])
    return (*found, float(value))


# A multiple of a part is exact: of one of 8 bits in f32, and of 33 in f64, while the factor has 16 and 20.
_PARTS = {torch.float32: _split(_HALF_PI, 8, 4), torch.float64: _split(_HALF_PI, 33, 2)}
# Up to here the multiple of pi / 2 has 16 bits.
_REDUCED = 1e5


def _excess(square: Tensor) -> Tensor:
    root = square.sqrt()
    return (torch.tan(root) / root - 1) / square


_LIMIT = (math.pi / 4) ** 2
# (tan(z) / z - 1) / (z * z) as a function of z * z, for z in [-pi / 4, pi / 4].
_EXCESS = fit(lambda s: _excess((s + 1) * (_LIMIT / 2)), 16)


@in_full
def tan(x: Tensor) -> Tensor:
    """``aten.tan``: the multiple of pi / 2 is taken off in parts, and odd ones leave a negative cotangent.

    Arguments up to 1e5 in f32, and 1e6 in f64, are reduced exactly; beyond, in f32 sine and cosine are divided, which a
    CPU's have all digits there, and in f64 digits are lost.

    Source: W. J. Cody and W. Waite, *Software manual for the elementary functions* (1980), chapter 9.
    """
    turns = torch.round(x * (2 / math.pi))
    rest = x
    for part in _PARTS[x.dtype]:
        rest = rest - turns * part
    square = rest * rest
    value = rest + rest * (square * evaluate(_EXCESS, square * (2 / _LIMIT) - 1))
    odd = turns - 2 * torch.floor(turns / 2) == 1
    value = torch.where(odd, -1 / value, value)
    return torch.where(x.abs() > _REDUCED, torch.sin(x) / torch.cos(x), value) if x.dtype is torch.float32 else value


def hypot(x: Tensor, y: Tensor) -> Tensor:
    """``aten.hypot``, which neither overflows nor underflows before its result does."""
    long, short = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    ratio = torch.where(long == 0, 0.0, short / torch.where(long == 0, 1.0, long))
    value = long * torch.sqrt(1 + ratio * ratio)
    return torch.where(torch.isinf(x) | torch.isinf(y), math.inf, value)


def log10(x: Tensor) -> Any:
    """``aten.log10`` by the natural logarithm."""
    return torch.log(x) * (1 / math.log(10)) if x.dtype.is_floating_point else NotImplemented


def copysign(x: Tensor, y: Tensor) -> Any:
    """``aten.copysign``: the magnitude of ``x`` with the sign of ``y``, that of a negative zero too."""
    if not x.dtype.is_floating_point or not y.dtype.is_floating_point:
        return NotImplemented
    # A zero has a sign of its own, which its reciprocal shows.
    negative = torch.where(y == 0, 1 / y, y) < 0
    return torch.where(negative, -x.abs(), x.abs())


def copysign_scalar(x: Tensor, y: float) -> Any:
    """``aten.copysign`` with a number."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    return -x.abs() if math.copysign(1.0, y) < 0 else x.abs().clone()


def tanh(x: Tensor) -> Any:
    """``aten.tanh`` in f64; torch-mlir's own for the other types."""
    if x.dtype is not torch.float64:
        return NotImplemented
    z = x.abs()
    shrunk = torch.expm1(-2 * z)
    return torch.where(x < 0, shrunk, -shrunk) / (2 + shrunk)


def angle(x: Tensor) -> Any:
    """``aten.angle`` of real numbers: pi where negative, NaN stays."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    return torch.where(torch.isnan(x), x, torch.where(x < 0, math.pi, 0.0).to(x.dtype))


# -- Error functions ---------------------------------------------------------------------------------------------------


def _erfcx_exponent(t: Tensor) -> Tensor:
    z = 2 / t - 2
    scaled = torch.special.erfcx(z) / t
    return torch.log(scaled)


# erfcx(z) = t exp(P(t)) with t = 2 / (2 + z), for z >= 0: P is smooth on (0, 1].
_ERFCX = fit(lambda s: _erfcx_exponent((s + 1) / 2), 40)


def _erfcx_of_positive(z: Tensor) -> Tensor:
    t = 2 / (2 + z)
    return t * torch.exp(evaluate(_ERFCX, 2 * t - 1))


@in_full
def erfc(x: Tensor) -> Tensor:
    """``aten.erfc``: accurate far out too, where 1 - erf(x) has no digits left."""
    z = x.abs()
    upper = torch.exp(-z * z) * _erfcx_of_positive(z)
    upper = torch.where(z > 30, 0.0, upper)
    return torch.where(x >= 0, upper, 2 - upper)


def erf(x: Tensor) -> Any:
    """``aten.erf`` in f64; torch-mlir's own for the other types."""
    if x.dtype is not torch.float64:
        return NotImplemented
    # Around zero the series of erf(x) / x, since 1 - erfc(x) loses the small ones.
    near = x * evaluate(_ERF_NEAR, 2 * (x * x).clamp(max=1.0) - 1)
    return torch.where(x.abs() < 1, near, 1 - erfc(x))


def _over_root(function: Callable[[Tensor], Tensor], square: Tensor) -> Tensor:
    root = square.sqrt()
    return function(root) / root


_ERF_NEAR = fit(lambda s: _over_root(torch.erf, (s + 1) / 2), 28)


def zero_tangent(primal: Tensor, other: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    """``aten._new_zeros_with_same_feature_meta``, a tangent of forward-mode differentiation: as ``other`` is, with the
    axes of batches that ``primal`` has."""
    shape = [*primal.shape[:self_num_batch_dims], *other.shape]
    return torch.zeros(shape, dtype=other.dtype, device=other.device)


def zero_tensor(size: list[int], **options: Any) -> Tensor:
    """``aten._efficientzerotensor`` as a tensor of zeros."""
    return torch.zeros(size, dtype=options.get("dtype"), device=options.get("device"))


# -- The logarithm of the gamma function, and its derivative -----------------------------------------------------------

# Shifted up by the recurrence to where an asymptotic series has all digits, below zero by reflection. Sums over shifts
# go along an axis of their own: ten quotients written out made kernels that took seconds to compile.
_SHIFTS = 10
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)


@in_full
def digamma(x: Tensor) -> Tensor:
    """``aten.digamma``: shifted up by the recurrence, then the asymptotic series; reflected below zero."""
    reflected = x < 0
    z = torch.where(reflected, 1 - x, x)
    big = z + _SHIFTS
    square = 1 / (big * big)
    series = torch.zeros_like(z)
    for k in reversed(range(len(_BERNOULLI))):
        series = (series + _BERNOULLI[k] / (2 * (k + 1))) * square
    value = (
        torch.log(big)
        - (1 / (z.unsqueeze(-1) + torch.arange(_SHIFTS, dtype=x.dtype, device=x.device))).sum(-1)
        - 0.5 / big
        - series
    )
    # The period is taken off first: the tangent of a large argument has no digits.
    rest = x - torch.trunc(x)
    turned = value - math.pi * torch.cos(math.pi * rest) / torch.sin(math.pi * rest)
    value = torch.where(reflected, torch.where(rest == 0, math.nan, turned), value)
    return torch.where(x == 0, torch.where(1 / x < 0, math.inf, -math.inf), value)


@in_full
def lgamma(x: Tensor) -> Tensor:
    """``aten.lgamma``: shifted up by the recurrence, then Stirling's series; reflected below one half."""
    reflected = x < 0.5
    z = torch.where(reflected, 1 - x, x)
    near = z < _SHIFTS
    product = torch.ones_like(z)
    for k in range(_SHIFTS):
        product = product * torch.where(near, z + k, 1.0)
    big = torch.where(near, z + _SHIFTS, z)
    square = 1 / (big * big)
    series = torch.zeros_like(z)
    for k in reversed(range(len(_BERNOULLI))):
        series = series * square + _BERNOULLI[k] / (2 * (k + 1) * (2 * k + 1))
    value = (big - 0.5) * torch.log(big) - big + 0.5 * math.log(2 * math.pi) + series / big - torch.log(product)
    sine = torch.sin(math.pi * (x - torch.floor(x))).abs()
    turned = math.log(math.pi) - torch.log(sine) - value
    value = torch.where(reflected, turned, value)
    poles = (x <= 0) & (x == torch.floor(x))
    return torch.where(poles | torch.isinf(x), math.inf, value)


# -- Hyperbolic functions ----------------------------------------------------------------------------------------------

# Beyond it sqrt(z * z + 1) is z in f64; and z * z is finite in f32.
_LARGE = 2.0**28


def expm1(x: Tensor) -> Any:
    """``aten.expm1`` in f64; IREE's own for the other types.

    Source: W. Kahan, in N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, section 1.14.1.
    """
    if x.dtype is not torch.float64:
        return NotImplemented
    power = torch.exp(x)
    # The rounding of the power is the same in its logarithm.
    logarithm = torch.log(power)
    near = torch.where(logarithm == 0, x, (power - 1) * (x / torch.where(logarithm == 0, 1.0, logarithm)))
    return torch.where(x.abs() < 1, near, power - 1)


@in_full
def sinh(x: Tensor) -> Tensor:
    """``aten.sinh`` by expm1, and beyond 20 by a square that overflows only where the result does."""
    z = x.abs()
    excess, root = torch.expm1(z), torch.exp(z / 2)
    value = torch.where(z > 20, root / 2 * root, (excess + excess / (excess + 1)) / 2)
    return torch.copysign(value, x)


@in_full
def asinh(x: Tensor) -> Tensor:
    """``aten.asinh`` of the magnitude, by log1p."""
    z = x.abs()
    value = torch.log1p(z + z * z / (1 + torch.sqrt(z * z + 1)))
    value = torch.where(z > _LARGE, torch.log(z) + math.log(2), value)
    return torch.copysign(value, x)


@in_full
def acosh(x: Tensor) -> Tensor:
    """``aten.acosh`` by log1p of what is above one."""
    above = x - 1
    value = torch.log1p(above + torch.sqrt(above * (above + 2)))
    value = torch.where(x > _LARGE, torch.log(x) + math.log(2), value)
    return torch.where(x < 1, math.nan, value)


@in_full
def atanh(x: Tensor) -> Tensor:
    """``aten.atanh`` of the magnitude, by log1p."""
    z = x.abs()
    value = torch.log1p(2 * z / (1 - z)) / 2
    return torch.copysign(value, x)


_NEAR_ZERO = "IREE's form is a difference that has no digit left near zero"


ENTRIES = (
    Decomposition(
        aten.tan.default,
        tan,
        "IREE's sine and cosine have an absolute error of 4e-7, which near a pole is all of the cosine",
    ),
    Decomposition(aten.tanh.default, tanh, "IREE has no such function in f64"),
    Decomposition(aten.log10.default, log10, "IREE's runtime has no function log10f"),
    Decomposition(aten.copysign.Tensor, copysign, "torch-mlir's form does not lower where shapes differ"),
    Decomposition(aten.copysign.Scalar, copysign_scalar, "torch-mlir's form does not lower where shapes differ"),
    Decomposition(aten.hypot.default, hypot, NO_LOWERING),
    Decomposition(aten.angle.default, angle, NO_LOWERING),
    Decomposition(aten.erf.default, erf, "IREE has no such function in f64"),
    Decomposition(aten._new_zeros_with_same_feature_meta.default, zero_tangent, NO_LOWERING),
    Decomposition(aten._efficientzerotensor.default, zero_tensor, "a tensor with no memory is one in eager alone"),
    Decomposition(aten.erfc.default, erfc, NO_LOWERING),
    *(
        Decomposition(op, from_pytorch(op), NO_LOWERING)
        for op in (aten.addmv.default, aten.dist.default, aten.narrow_copy.default)
    ),
    Decomposition(aten.digamma.default, digamma, NO_LOWERING),
    Decomposition(aten.lgamma.default, lgamma, NO_LOWERING),
    Decomposition(aten.expm1.default, expm1, f"in f64 {_NEAR_ZERO}"),
    Decomposition(aten.sinh.default, sinh, _NEAR_ZERO),
    Decomposition(aten.asinh.default, asinh, f"{_NEAR_ZERO}, and infinite below -4000"),
    Decomposition(aten.acosh.default, acosh, "IREE's form has no digit left near one, and is infinite from 2e19 on"),
    Decomposition(aten.atanh.default, atanh, _NEAR_ZERO),
)
