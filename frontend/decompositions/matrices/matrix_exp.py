# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The exponential of a matrix, by scaling and squaring: exp(A) = exp(A / 2**s) ** (2**s).

How often a matrix is halved depends on its norm, which a trace does not know: all are squared as often as the largest
norm needs, and each takes the results of its own steps. PyTorch's gradient is the exponential of a matrix of twice the
size, and so by this form, too.
Source: Higham, *Functions of Matrices* (2008), algorithm 10.20, with a Taylor polynomial (Paterson and Stockmeyer, *On
the Number of Nonscalar Multiplications Necessary to Evaluate Polynomials*, 1973) for the Pade approximant.
"""

from __future__ import annotations

from math import factorial, nan
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition

aten = torch.ops.aten

# The largest norm that the polynomial of degree 16 takes, with an error of a rounding: 2**17 / 17! and (1/2)**17 / 17!.
_LEAST_NORM = {torch.float32: 2.0, torch.float64: 0.5}
_DEGREE, _BLOCK = 16, 4
# Norms of up to 2**20 times that: of larger ones the exponential is nothing but zeros and infinities.
_SQUARINGS = 20
_MOST_ROWS = 128


def matrix_exp(a: Tensor) -> Any:
    """``aten.linalg_matrix_exp`` of ``a [..., n, n]``, float32 or float64, n up to 128 and fixed; others are turned
    away. A matrix whose norm is beyond all that is halved gives NaN."""
    rows = a.shape[-1]
    if a.dtype not in _LEAST_NORM or not isinstance(rows, int) or rows > _MOST_ROWS:
        return NotImplemented
    if not a.numel():
        return a.clone()
    norm = a.abs().sum(-2).amax(-1)
    steps = torch.ceil(torch.log2(norm / _LEAST_NORM[a.dtype])).clamp(min=0)[..., None, None]
    power = _polynomial(a * torch.exp2(-steps))
    for step in range(_SQUARINGS):
        power = torch.where(steps > step, power @ power, power)
    return torch.where(steps > _SQUARINGS, nan, power)


def _polynomial(a: Tensor) -> Tensor:
    """The Taylor polynomial of the exponential at ``a``, by powers up to the fourth and Horner's rule on blocks of
    four: six products."""
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    square = a @ a
    powers = [one, a, square, square @ a]
    fourth = square @ square
    total = one / factorial(_DEGREE)
    for first in range(_DEGREE - _BLOCK, -1, -_BLOCK):
        block = sum((p / factorial(first + i) for i, p in enumerate(powers[1:], 1)), one / factorial(first))
        total = fourth @ total + block
    return total


ENTRIES = (Decomposition(aten.linalg_matrix_exp.default, matrix_exp, NO_LOWERING),)
