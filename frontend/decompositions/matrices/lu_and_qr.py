# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""LU with partial pivoting and QR by reflections, column by column, and what is worked out from them.

As for triangular systems, a matrix of n columns becomes n steps, and a singular one gives infinities or NaN where
eager raises. The conventions (pivots from 1, signs of reflections) are LAPACK's.
Source: Golub and Van Loan, *Matrix Computations* (2013), algorithms 3.4.1 (outer-product LU) and 5.2.1 (Householder
QR); LAPACK's ``larfg``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition
from retrograd.frontend.decompositions.matrices.cholesky import is_small, solve_rows

aten = torch.ops.aten


# -- LU --------------------------------------------------------------------------------------------------------------


def lu_factor_ex(a: Tensor, *, pivot: bool = True, check_errors: bool = False) -> Any:
    """``aten.linalg_lu_factor_ex``: both factors in one matrix; the row that each was swapped with, from 1 (int32);
    per matrix the number of its first pivot that is zero (int32), or 0."""
    return _factor(a, pivot=pivot) if is_small(a) else NotImplemented


def lu(a: Tensor, *, pivot: bool = True) -> Any:
    """``aten.linalg_lu``: the permutation, L and U."""
    if not is_small(a):
        return NotImplemented
    packed, pivots, _ = _factor(a, pivot=pivot)
    permutation, lower, upper = _unpack(packed, pivots)
    return (permutation if pivot else a.new_empty(0)), lower, upper


def lu_unpack(packed: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    """``aten.lu_unpack``: the permutation, L and U; what is not asked for is empty."""
    if not is_small(packed):
        return NotImplemented
    permutation, lower, upper = _unpack(packed, pivots)
    none = packed.new_empty(0)
    return permutation if unpack_pivots else none, lower if unpack_data else none, upper if unpack_data else none


def lu_solve(packed: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False) -> Any:
    """``aten.linalg_lu_solve``: ``a @ x = b`` from the factors of ``a``, or ``x @ a = b`` unless ``left``; with the
    transpose of ``a`` if ``adjoint``."""
    if not is_small(packed):
        return NotImplemented
    if left:
        return _solve(packed, pivots, b, transposed=adjoint)
    return _solve(packed, pivots, b.mT, transposed=not adjoint).mT


def solve_ex(a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    """``aten._linalg_solve_ex``: the solution, and what `lu_factor_ex` gives of ``a`` as `_read_as` has it."""
    if not is_small(a):
        return NotImplemented
    matrix, transposed = _read_as(a, _SOLVE_KEEPS_TRANSPOSE)
    packed, pivots, info = _factor(matrix)
    vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    columns = b.unsqueeze(-1) if vector else b
    solution = lu_solve(packed, pivots, columns, left=left, adjoint=transposed)
    return (solution.squeeze(-1) if vector else solution), packed, pivots, info


def inv_ex(a: Tensor, *, check_errors: bool = False) -> Any:
    """``aten.linalg_inv_ex``: the inverse, and the ``info`` of `lu_factor_ex`."""
    if not is_small(a):
        return NotImplemented
    packed, pivots, info = _factor(a)
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return _solve(packed, pivots, one, transposed=False), info


def det(a: Tensor) -> Any:
    """``aten._linalg_det``: the determinant, and the factors that it is worked out from."""
    if not is_small(a):
        return NotImplemented
    packed, pivots, _ = _factor(_read_as(a, _DET_KEEPS_TRANSPOSE)[0])
    return _multiply(packed.diagonal(dim1=-2, dim2=-1)) * _parity(pivots).to(a.dtype), packed, pivots


def slogdet(a: Tensor) -> Any:
    """``aten._linalg_slogdet``: the determinant's sign, the logarithm of its magnitude, and the factors."""
    if not is_small(a):
        return NotImplemented
    packed, pivots, _ = _factor(_read_as(a, _SLOGDET_KEEPS_TRANSPOSE)[0])
    diagonal = packed.diagonal(dim1=-2, dim2=-1)
    sign = _multiply(torch.sign(diagonal)) * _parity(pivots).to(a.dtype)
    return sign, torch.log(diagonal.abs()).sum(-1), packed, pivots


def _keeps_transpose(op: OpOverload, *more: Tensor) -> bool:
    """Whether the factors that ``op`` gives of a contiguous matrix are its transpose's.

    PyTorch's kernels save a copy so, which kernels in which version; derivative formulas go by the same rule.
    """
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    packed = next(t for t in op(a, *more)[1:] if t.dim() == 2)
    return torch.equal(packed, torch.linalg.lu_factor(a.mT).LU)


def _read_as(a: Tensor, transpose: bool) -> tuple[Tensor, bool]:
    """The matrix whose factors are kept, and whether that is the transpose of ``a``."""
    transposed = transpose and a.is_contiguous()
    return (a.mT if transposed else a), transposed


_SOLVE_KEEPS_TRANSPOSE = _keeps_transpose(aten._linalg_solve_ex.default, torch.eye(2))
_DET_KEEPS_TRANSPOSE = _keeps_transpose(aten._linalg_det.default)
_SLOGDET_KEEPS_TRANSPOSE = _keeps_transpose(aten._linalg_slogdet.default)


def _factor(a: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    m, n = a.shape[-2:]
    count, batch = min(m, n), a.shape[:-2]
    info = torch.zeros(batch, dtype=torch.int32, device=a.device)
    if a.numel() == 0:
        return torch.zeros_like(a), torch.zeros(*batch, count, dtype=torch.int32, device=a.device), info
    pivots = []
    for k in range(count):
        column = a[..., k:, k]
        place = column.abs().argmax(-1, keepdim=True) + k if pivot else torch.full_like(column[..., :1], k).long()
        pivots.append(place)
        a = _swap(a, k, place) if pivot and m > 1 else a
        head, below = a[..., k : k + 1, k : k + 1], a[..., k + 1 :, k : k + 1]
        zero = head == 0
        info = torch.where((info == 0) & zero[..., 0, 0], k + 1, info).to(torch.int32)
        below = torch.where(zero, below, below / torch.where(zero, 1.0, head))
        rest = a[..., k + 1 :, k + 1 :] - below * a[..., k : k + 1, k + 1 :]
        lower = torch.cat([a[..., k + 1 :, :k], below, rest], -1)
        a = torch.cat([a[..., : k + 1, :], lower], -2)
    return a, (torch.cat(pivots, -1) + 1).to(torch.int32), info


def _swap(a: Tensor, k: int, place: Tensor) -> Tensor:
    """``a [..., m, n]`` with its rows ``k`` and ``place [..., 1]`` in each other's place."""
    number = torch.arange(a.shape[-2], device=a.device)
    source = torch.where(number == k, place, torch.where(number == place, k, number))
    return a.gather(-2, source.unsqueeze(-1).expand(a.shape))


def _order_of(pivots: Tensor, m: int) -> Tensor:
    """``[..., m]``: which row of the matrix is where after all swaps."""
    order = torch.arange(m, device=pivots.device).expand(*pivots.shape[:-1], m).unsqueeze(-1)
    for k in range(pivots.shape[-1]):
        order = _swap(order, k, pivots[..., k : k + 1].to(torch.int64) - 1)
    return order.squeeze(-1)


def _permutation(pivots: Tensor, m: int, dtype: torch.dtype) -> Tensor:
    """P of ``a = P @ L @ U``."""
    return (torch.arange(m, device=pivots.device).unsqueeze(-1) == _order_of(pivots, m).unsqueeze(-2)).to(dtype)


def _unpack(packed: Tensor, pivots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m, n = packed.shape[-2:]
    count = min(m, n)
    lower = torch.tril(packed[..., :count], -1) + torch.eye(m, count, dtype=packed.dtype, device=packed.device)
    return _permutation(pivots, m, packed.dtype), lower, torch.triu(packed[..., :count, :])


def _solve(packed: Tensor, pivots: Tensor, b: Tensor, *, transposed: bool) -> Tensor:
    permutation = _permutation(pivots, packed.shape[-2], packed.dtype)
    if b.numel() == 0 or packed.numel() == 0:
        batch = torch.broadcast_shapes(packed.shape[:-2], b.shape[:-2])
        return b.new_zeros(*batch, *b.shape[-2:])
    if transposed:
        inner = solve_rows(packed.mT, b, upper=False)
        return permutation @ solve_rows(packed.mT, inner, upper=True, unit=True)
    inner = solve_rows(packed, permutation.mT @ b, upper=False, unit=True)
    return solve_rows(packed, inner, upper=True)


def _parity(pivots: Tensor) -> Tensor:
    """1, or -1 where an odd number of rows was swapped."""
    number = torch.arange(1, pivots.shape[-1] + 1, device=pivots.device)
    return 1 - 2 * ((pivots != number).sum(-1) % 2)


def _multiply(row: Tensor) -> Tensor:
    product = row.new_ones(row.shape[:-1])
    for k in range(row.shape[-1]):
        product = product * row[..., k]
    return product


# -- QR --------------------------------------------------------------------------------------------------------------


def geqrf(a: Tensor) -> Any:
    """``aten.geqrf``: R with the reflections' vectors below it, and their factors ``[..., min(m, n)]``."""
    return _reflect(a) if is_small(a) else NotImplemented


def qr(a: Tensor, mode: str = "reduced") -> Any:
    """``aten.linalg_qr``: Q and R; Q is empty in mode ``r``."""
    if not is_small(a):
        return NotImplemented
    m, n = a.shape[-2:]
    packed, factors = _reflect(a)
    columns = m if mode == "complete" else min(m, n)
    upper = torch.triu(packed[..., : (m if mode == "complete" else min(m, n)), :])
    if mode == "r":
        return a.new_empty(0), upper
    one = torch.eye(m, columns, dtype=a.dtype, device=a.device).expand(*a.shape[:-2], m, columns)
    return _apply(packed, factors, one, transposed=False), upper


def householder_product(vectors: Tensor, factors: Tensor) -> Any:
    """``aten.linalg_householder_product``: the first columns of the product of reflections."""
    if not is_small(vectors):
        return NotImplemented
    one = torch.eye(*vectors.shape[-2:], dtype=vectors.dtype, device=vectors.device)
    return _apply(vectors, factors, one.expand(vectors.shape), transposed=False)


def ormqr(vectors: Tensor, factors: Tensor, other: Tensor, left: bool = True, transpose: bool = False) -> Any:
    """``aten.ormqr``: ``q @ other``, or ``other @ q`` unless ``left``, for the square product ``q`` of reflections, or
    its transpose."""
    if not is_small(vectors):
        return NotImplemented
    if left:
        return _apply(vectors, factors, other, transposed=transpose)
    return _apply(vectors, factors, other.mT, transposed=not transpose).mT


def _reflect(a: Tensor) -> tuple[Tensor, Tensor]:
    m, n = a.shape[-2:]
    count = min(m, n)
    if a.numel() == 0:
        return torch.zeros_like(a), a.new_zeros(*a.shape[:-2], count)
    factors, rows, below = [], [], []
    for _ in range(count):
        head, tail = a[..., :1, :1], a[..., 1:, :1]
        square = (tail * tail).sum(-2, keepdim=True)
        # Nothing to reflect: the column ends in zeros already.
        plain = square == 0
        norm = torch.sqrt(head * head + square)
        beta = torch.where(plain, head, torch.where(head < 0, norm, -norm))
        factor = torch.where(plain, 0.0, (beta - head) / torch.where(plain, 1.0, beta))
        vector = torch.where(plain, 0.0, tail / torch.where(plain, 1.0, head - beta))
        factors.append(factor.squeeze(-1))
        first, others = a[..., :1, 1:], a[..., 1:, 1:]
        along = factor * (first + (vector * others).sum(-2, keepdim=True))
        rows.append(torch.cat([beta, first - along], -1))
        below.append(vector)
        a = others - vector * along
    packed = [
        torch.cat([*[v[..., k - 1 - j : k - j, :] for j, v in enumerate(below[:k])], row], -1)
        for k, row in enumerate(rows)
    ]
    if m > count:
        packed.append(torch.cat([v[..., count - 1 - j :, :] for j, v in enumerate(below)], -1))
    return torch.cat(packed, -2), torch.cat(factors, -1)


def _apply(vectors: Tensor, factors: Tensor, other: Tensor, *, transposed: bool) -> Tensor:
    """The product of reflections, or its transpose, with ``other [..., m, n]``."""
    if other.numel() == 0:
        return torch.zeros_like(other)
    batch = torch.broadcast_shapes(vectors.shape[:-2], other.shape[:-2])
    other = other.expand(*batch, *other.shape[-2:])
    numbers = range(factors.shape[-1])
    for k in numbers if transposed else reversed(numbers):
        one = torch.ones_like(vectors[..., :1, :1])
        vector = torch.cat([one, vectors[..., k + 1 :, k : k + 1]], -2)
        part = other[..., k:, :]
        changed = part - factors[..., k : k + 1].unsqueeze(-1) * vector * (vector * part).sum(-2, keepdim=True)
        other = torch.cat([other[..., :k, :], changed], -2) if k else changed
    return other


ENTRIES = tuple(
    Decomposition(op, function, NO_LOWERING)
    for op, function in (
        (aten.linalg_lu_factor_ex.default, lu_factor_ex),
        (aten.linalg_lu.default, lu),
        (aten.lu_unpack.default, lu_unpack),
        (aten.linalg_lu_solve.default, lu_solve),
        (aten._linalg_solve_ex.default, solve_ex),
        (aten.linalg_inv_ex.default, inv_ex),
        (aten._linalg_det.default, det),
        (aten._linalg_slogdet.default, slogdet),
        (aten.geqrf.default, geqrf),
        (aten.linalg_qr.default, qr),
        (aten.linalg_householder_product.default, householder_product),
        (aten.ormqr.default, ormqr),
    )
)
