# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The gamma function's logarithm and its derivative: shifted up by the recurrence to where an asymptotic series has
all digits, below zero by reflection.

Sums over shifts go along an axis of their own: ten quotients written out made kernels that took seconds to compile.
"""

from __future__ import annotations

import math

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


ENTRIES = (
    Decomposition(aten.digamma.default, digamma, NO_LOWERING),
    Decomposition(aten.lgamma.default, lgamma, NO_LOWERING),
)
