# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The gamma function's logarithm and its derivatives: shifted up by the recurrence to where an asymptotic series has
all digits, below zero by reflection.

Sums over shifts go along an axis of their own: ten quotients written out made kernels that took seconds to compile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition
from retrograd.frontend.decompositions.functions.chebyshev import in_full

aten = torch.ops.aten

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
    value = torch.log(big) - (1 / _shifts(z)).sum(-1) - 0.5 / big - series
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


def polygamma(n: int, x: Tensor) -> Any:
    """``aten.polygamma``: for ``n`` of 1 and more (-1)**(n + 1) n! zeta(n + 1, x), by Euler and Maclaurin."""
    if n == 0:
        return digamma(x)
    if x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    if not x.dim():
        # Of a tensor of no axes, iree-compile's fusion of what several ops read does not come to an end.
        return polygamma(n, x.expand(2))[0]
    reflected = x < 0
    value = _hurwitz(torch.where(reflected, 1 - x, x), n + 1) * ((-1.0) ** (n + 1) * math.factorial(n))
    rest = math.pi * (x - torch.trunc(x))
    turned = (-1.0) ** n * value - math.pi ** (n + 1) * _cotangent_derivative(torch.cos(rest) / torch.sin(rest), n)
    value = torch.where(reflected, turned, value)
    return torch.where((x <= 0) & (x == torch.floor(x)), (-1.0) ** (n + 1) * math.inf, value)


def _hurwitz(x: Tensor, order: int) -> Tensor:
    """zeta(order, x) for x >= 0, by Euler and Maclaurin."""
    big = x + _SHIFTS
    square = 1 / (big * big)
    series = torch.zeros_like(x)
    for k in reversed(range(len(_BERNOULLI))):
        rising = math.prod(range(order, order + 2 * k + 1)) / math.factorial(2 * k + 2)
        series = series * square + _BERNOULLI[k] * rising
    last = _inverse_power(big, order)
    return _inverse_power(_shifts(x), order).sum(-1) + last * (big / (order - 1) + 0.5 + series / big)


def _shifts(x: Tensor) -> Tensor:
    """``x``, x + 1, ..., along a last axis of ``_SHIFTS`` elements."""
    return x.unsqueeze(-1) + torch.arange(_SHIFTS, dtype=x.dtype, device=x.device)


def _cotangent_derivative(cotangent: Tensor, n: int) -> Tensor:
    """The n-th derivative of cot, as a polynomial in cot itself: c' = -(1 + c * c)."""
    polynomial = [0.0, 1.0]
    for _ in range(n):
        slope = [k * polynomial[k] for k in range(1, len(polynomial))]
        polynomial = [-a - b for a, b in zip([*slope, 0.0, 0.0], [0.0, 0.0, *slope], strict=True)]
    value = torch.full_like(cotangent, polynomial[-1])
    for coefficient in reversed(polynomial[:-1]):
        value = value * cotangent + coefficient
    return value


def _inverse_power(x: Tensor, order: int) -> Tensor:
    power = x
    for _ in range(order - 1):
        power = power * x
    return 1 / power


ENTRIES = tuple(
    Decomposition(op, function, NO_LOWERING)
    for op, function in (
        (aten.digamma.default, digamma),
        (aten.lgamma.default, lgamma),
        (aten.polygamma.default, polygamma),
    )
)
