# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Cholesky's factorization and triangular systems, one row of the matrix after the other.

A matrix of n rows becomes n steps on what is left of it, elementwise along all other axes, so that a batch costs no
step more. Where eager raises, because a matrix is singular or not positive definite, results are infinite or NaN.
Source: Golub and Van Loan, *Matrix Computations* (2013), algorithms 3.1.3 (column-oriented substitution) and 4.2.5
(outer-product Cholesky).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition

aten = torch.ops.aten

# Each row adds some kernels to the program: past this many, compiling takes minutes.
MOST_ROWS = 32


def is_small(*matrices: Tensor) -> bool:
    """Whether matrices are real and of fixed sizes few enough to take them apart row by row."""
    return all(
        m.dtype in (torch.float32, torch.float64)
        and all(isinstance(size, int) for size in m.shape)
        and min(m.shape[-2:]) <= MOST_ROWS
        for m in matrices
    )


def solve_rows(a: Tensor, b: Tensor, *, upper: bool, unit: bool = False) -> Tensor:
    """``x [..., n, m]`` of ``a @ x = b`` for a triangular ``a [..., n, n]``; the other triangle is not read."""
    n = a.shape[-1]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, rest = a.expand(*batch, n, n), b.expand(*batch, *b.shape[-2:])
    if rest.numel() == 0:
        return torch.zeros_like(rest)
    rows: list[Tensor] = []
    for step in range(n):
        k = n - 1 - step if upper else step
        at = -1 if upper else 0
        row = rest.narrow(-2, at % rest.shape[-2], 1)
        row = row if unit else row / a[..., k : k + 1, k : k + 1]
        rows.append(row)
        left = a[..., :k, k : k + 1] if upper else a[..., k + 1 :, k : k + 1]
        kept = rest[..., :-1, :] if upper else rest[..., 1:, :]
        rest = kept - left * row
    return torch.cat(rows[::-1] if upper else rows, -2)


def solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    """``aten.linalg_solve_triangular``: ``a @ x = b``, or ``x @ a = b`` unless ``left``."""
    if not is_small(a):
        return NotImplemented
    if left:
        return solve_rows(a, b, upper=upper, unit=unitriangular)
    return solve_rows(a.mT, b.mT, upper=not upper, unit=unitriangular).mT


def triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    """``aten.triangular_solve``: the solution, and ``a`` as it was used."""
    if not is_small(a):
        return NotImplemented
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    matrix = a.mT if transpose else a
    solution = solve_rows(matrix, b, upper=upper != transpose, unit=unitriangular)
    return solution, a.expand(*batch, *a.shape[-2:]).clone()


def cholesky_ex(a: Tensor, *, upper: bool = False, check_errors: bool = False) -> Any:
    """``aten.linalg_cholesky_ex``: the factor, and per matrix the number of its first leading minor that is not
    positive (int32), or 0."""
    if not is_small(a):
        return NotImplemented
    factor, info = _factor(a.mT if upper else a)
    return (factor.mT if upper else factor), info


def cholesky(a: Tensor, upper: bool = False) -> Any:
    """``aten.cholesky``: the factor."""
    return _factor(a.mT)[0].mT if is_small(a) and upper else _factor(a)[0] if is_small(a) else NotImplemented


def cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Any:
    """``aten.cholesky_solve``: ``x`` of ``l @ l.T @ x = b``."""
    return _solve_factored(factor.mT if upper else factor, b) if is_small(factor) else NotImplemented


def cholesky_inverse(factor: Tensor, upper: bool = False) -> Any:
    """``aten.cholesky_inverse``: the inverse of ``l @ l.T``."""
    if not is_small(factor):
        return NotImplemented
    one = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return _solve_factored(factor.mT if upper else factor, one)


def _solve_factored(lower: Tensor, b: Tensor) -> Tensor:
    return solve_rows(lower.mT, solve_rows(lower, b, upper=False), upper=True)


def _factor(a: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky's factor of ``a``, of which the lower triangle is read, and the ``info`` of `cholesky_ex`."""
    n = a.shape[-1]
    info = torch.zeros(a.shape[:-2], dtype=torch.int32, device=a.device)
    if a.numel() == 0:
        return torch.zeros_like(a), info
    columns, rest = [], a
    for k in range(n):
        head = rest[..., :1, :1]
        positive = head > 0
        info = torch.where((info == 0) & ~positive[..., 0, 0], k + 1, info).to(torch.int32)
        root = torch.sqrt(torch.where(positive, head, math.nan))
        column = torch.cat([root, rest[..., 1:, :1] / root], -2)
        columns.append(aten.constant_pad_nd.default(column, [0, 0, k, 0], 0.0))
        below = column[..., 1:, :]
        rest = rest[..., 1:, 1:] - below * below.mT
    return torch.cat(columns, -1), info


ENTRIES = (
    Decomposition(aten.linalg_solve_triangular.default, solve_triangular, NO_LOWERING),
    Decomposition(aten.triangular_solve.default, triangular_solve, NO_LOWERING),
    Decomposition(aten.linalg_cholesky_ex.default, cholesky_ex, NO_LOWERING),
    Decomposition(aten.cholesky.default, cholesky, NO_LOWERING),
    Decomposition(aten.cholesky_solve.default, cholesky_solve, NO_LOWERING),
    Decomposition(aten.cholesky_inverse.default, cholesky_inverse, NO_LOWERING),
)
