# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sums, products, powers and functions of complex numbers, in terms of their parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from retrograd.frontend.complex_numbers.pair import (
    REAL_DTYPES,
    Pair,
    Value,
    absolute,
    add,
    as_pair,
    divide,
    is_complex,
    multiply,
    parts,
    subtract,
)

aten, prims = torch.ops.aten, torch.ops.prims

# Powers up to this one are products.
_PRODUCTS = 8


# -- From real numbers and to them ----------------------------------------------------------------------------------


def from_polar(length: Tensor, angle: Tensor) -> Pair:
    """``aten.polar``."""
    return Pair(length * torch.cos(angle), length * torch.sin(angle))


def view_as_complex(x: Tensor) -> Pair:
    """``aten.view_as_complex``."""
    return Pair(x.select(-1, 0), x.select(-1, 1))


def view_as_real(x: Pair) -> Tensor:
    """``aten.view_as_real``."""
    return torch.stack([x.re, x.im], -1)


def convert(op: OpOverload, x: Value, *args: Any, **kwargs: Any) -> Any:
    """A conversion: from real numbers, to real numbers (the imaginary part is lost), or between complex ones."""
    dtype = args[0] if args else kwargs.get("dtype")
    if dtype is not None and dtype not in REAL_DTYPES:
        return op(parts(x)[0], *args, **kwargs)
    real = None if dtype is None else REAL_DTYPES[dtype]
    args, kwargs = ((real,), kwargs) if args else ((), {**kwargs, "dtype": real})
    if isinstance(x, Pair):
        return x.map(lambda part: op(part, *args, **kwargs))
    converted = op(x, *args, **kwargs)
    return Pair(converted, torch.zeros_like(converted))


def ones(op: OpOverload, *args: Any, **kwargs: Any) -> Pair:
    """Ones of a complex type, shaped as ``op`` says."""
    if kwargs.get("dtype") is not None:
        kwargs = {**kwargs, "dtype": REAL_DTYPES[kwargs["dtype"]]}
    one: Tensor = op(*(a.re if isinstance(a, Pair) else a for a in args), **kwargs)
    return Pair(one, torch.zeros_like(one))


def angle(x: Pair) -> Tensor:
    """``aten.angle``."""
    return torch.atan2(x.im, x.re)


# -- Sums and products ----------------------------------------------------------------------------------------------


def with_alpha(function: Callable[[Value, Value], Pair], x: Value, y: Value, alpha: complex = 1) -> Pair:
    """A sum or difference whose second operand is multiplied by ``alpha`` first."""
    if alpha == 1:
        return function(x, y)
    if is_complex(y) or is_complex(alpha):
        return function(x, multiply(y, alpha) if isinstance(y, (Pair, Tensor)) else y * alpha)
    return function(x, y * alpha)  # type: ignore[operator]


def product_of(op: OpOverload, x: Value, y: Value) -> Pair:
    """A product of matrices or vectors, or an element by an element."""
    return multiply(x, y, op)


def power(x: Value, exponent: Value) -> Any:
    """``aten.pow``: products where the exponent is a small whole number, otherwise by the logarithm."""
    if isinstance(x, Pair) and isinstance(exponent, (int, float)):
        if exponent == int(exponent) and 0 <= abs(exponent) <= _PRODUCTS:
            return _whole_power(x, int(exponent))
        if exponent == 0.5:
            return sqrt(x)
        length = absolute(x) ** exponent
        return from_polar(length, angle(x) * exponent)
    like = next(t for t in (*parts(x), *parts(exponent)) if isinstance(t, Tensor))
    base, scale = as_pair(x, like), as_pair(exponent, like)
    result = exp(multiply(scale, log(base)))
    # Zero has no logarithm; its powers are zero, and one where the exponent is.
    zero, none = (base.re == 0) & (base.im == 0), (scale.re == 0) & (scale.im == 0)
    return Pair(torch.where(none, 1.0, torch.where(zero, 0.0, result.re)), torch.where(none | zero, 0.0, result.im))


def _whole_power(x: Pair, exponent: int) -> Pair:
    if exponent < 0:
        return reciprocal(_whole_power(x, -exponent))
    if exponent == 0:
        return Pair(torch.ones_like(x.re), torch.zeros_like(x.im))
    if exponent == 1:
        return x
    half = _whole_power(x, exponent // 2)
    squared = multiply(half, half)
    return multiply(squared, x) if exponent % 2 else squared


def reciprocal(x: Pair) -> Pair:
    """``aten.reciprocal``."""
    return divide(torch.ones_like(x.re), x)


def vector_norm(x: Pair, *args: Any, **kwargs: Any) -> Tensor:
    """``aten.linalg_vector_norm``: that of the absolute values."""
    result: Tensor = aten.linalg_vector_norm.default(absolute(x), *args, **kwargs)
    return result


def variance(x: Pair, *args: Any, **kwargs: Any) -> Tensor:
    """``aten.var``: that of the real part and that of the imaginary part."""
    result: Tensor = aten.var.correction(x.re, *args, **kwargs) + aten.var.correction(x.im, *args, **kwargs)
    return result


def equal(x: Value, y: Value) -> Tensor:
    """``aten.eq``."""
    (a, b), (c, d) = parts(x), parts(y)
    result: Tensor = (a == c) & (b == d)
    return result


# -- Functions ------------------------------------------------------------------------------------------------------


def sign(x: Pair) -> Pair:
    """``aten.sgn``: of length one, or zero."""
    length = absolute(x)
    safe = torch.where(length == 0, 1.0, length)
    return Pair(x.re / safe, x.im / safe)


def exp(x: Pair) -> Pair:
    """The exponential function."""
    return from_polar(torch.exp(x.re), x.im)


def log(x: Pair) -> Pair:
    """The principal value of the logarithm."""
    return Pair(torch.log(absolute(x)), angle(x))


def log_to_base(base: float, x: Pair) -> Pair:
    """The principal value of the logarithm to ``base``."""
    return log(x).map(lambda part: part / base)


def sqrt(x: Pair) -> Pair:
    """The principal square root; of the two parts, the one that would cancel is found by division."""
    larger = torch.sqrt((absolute(x) + x.re.abs()) / 2)
    smaller = torch.where(larger == 0, 0.0, x.im.abs() / (2 * larger))
    right = x.re >= 0
    return Pair(torch.where(right, larger, smaller), torch.copysign(torch.where(right, smaller, larger), x.im))


def sin(x: Pair) -> Pair:
    """The sine."""
    return Pair(torch.sin(x.re) * torch.cosh(x.im), torch.cos(x.re) * torch.sinh(x.im))


def cos(x: Pair) -> Pair:
    """The cosine."""
    return Pair(torch.cos(x.re) * torch.cosh(x.im), -torch.sin(x.re) * torch.sinh(x.im))


def sinh(x: Pair) -> Pair:
    """The hyperbolic sine."""
    return Pair(torch.sinh(x.re) * torch.cos(x.im), torch.cosh(x.re) * torch.sin(x.im))


def cosh(x: Pair) -> Pair:
    """The hyperbolic cosine."""
    return Pair(torch.cosh(x.re) * torch.cos(x.im), torch.sinh(x.re) * torch.sin(x.im))


def tanh(x: Pair) -> Pair:
    """The hyperbolic tangent, by that of the real part, which does not overflow."""
    t, s, c = torch.tanh(x.re), torch.sin(x.im), torch.cos(x.im)
    below = c * c + t * t * s * s
    return Pair(t / below, s * c * (1 - t * t) / below)


def sigmoid(x: Pair) -> Pair:
    """The logistic function."""
    half = tanh(x.map(lambda part: part / 2))
    return Pair((1 + half.re) / 2, half.im / 2)


def tan(x: Pair) -> Pair:
    """The tangent."""
    return -tanh(x.turned()).turned()


def tanh_backward(gradient: Value, y: Pair) -> Pair:
    """The gradient of ``tanh``, by its result."""
    return multiply(gradient, subtract(1, multiply(y, y)).conj())


def sigmoid_backward(gradient: Value, y: Pair) -> Pair:
    """The gradient of ``sigmoid``, by its result."""
    return multiply(gradient, multiply(y, subtract(1, y)).conj())


def conj(x: Value) -> Pair:
    """The complex conjugate, of a number too, which the tracer writes as an op."""
    return Pair(*(p if isinstance(p, Tensor) else torch.full((), p, device="cpu") for p in parts(x))).conj()


_NATURAL = {2: 0.6931471805599453, 10: 2.302585092994046}

RULES: dict[OpOverload, Callable[..., Any]] = {
    aten.complex.default: Pair,
    aten.polar.default: from_polar,
    aten.view_as_complex.default: view_as_complex,
    aten.view_as_real.default: view_as_real,
    prims.convert_element_type.default: partial(convert, prims.convert_element_type.default),
    aten._to_copy.default: partial(convert, aten._to_copy.default),
    **{op: partial(ones, op) for op in (aten.ones.default, aten.ones_like.default, aten.new_ones.default)},
    aten._conj.default: conj,
    aten._conj_physical.default: conj,
    aten.resolve_conj.default: lambda x: x,
    aten.resolve_neg.default: lambda x: x,
    aten._neg_view.default: lambda x: -x,
    aten.abs.default: absolute,
    aten.angle.default: angle,
    aten.add.Tensor: partial(with_alpha, add),
    aten.add.Scalar: partial(with_alpha, add),
    aten.sub.Tensor: partial(with_alpha, subtract),
    aten.sub.Scalar: partial(with_alpha, subtract),
    aten.rsub.Scalar: lambda x, y, alpha=1: subtract(y, x if alpha == 1 else multiply(x, alpha)),
    **{
        op: partial(product_of, op.overloadpacket)
        for op in (aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
    },
    aten.mul.Tensor: multiply,
    aten.mul.Scalar: multiply,
    aten.div.Tensor: divide,
    aten.div.Scalar: divide,
    aten.reciprocal.default: reciprocal,
    aten.pow.Tensor_Scalar: power,
    aten.pow.Tensor_Tensor: power,
    aten.pow.Scalar: power,
    aten.linalg_vector_norm.default: vector_norm,
    aten.var.correction: variance,
    aten.eq.Tensor: equal,
    aten.eq.Scalar: equal,
    aten.ne.Tensor: lambda x, y: ~equal(x, y),
    aten.ne.Scalar: lambda x, y: ~equal(x, y),
    aten.isnan.default: lambda x: torch.isnan(x.re) | torch.isnan(x.im),
    aten.sgn.default: sign,
    aten.exp.default: exp,
    aten.log.default: log,
    aten.log2.default: partial(log_to_base, _NATURAL[2]),
    aten.log10.default: partial(log_to_base, _NATURAL[10]),
    aten.log1p.default: lambda x: log(add(x, 1)),
    aten.sqrt.default: sqrt,
    aten.rsqrt.default: lambda x: reciprocal(sqrt(x)),
    aten.sin.default: sin,
    aten.cos.default: cos,
    aten.tan.default: tan,
    aten.sinh.default: sinh,
    aten.cosh.default: cosh,
    aten.tanh.default: tanh,
    aten.tanh_backward.default: tanh_backward,
    aten.sigmoid.default: sigmoid,
    aten.sigmoid_backward.default: sigmoid_backward,
}
