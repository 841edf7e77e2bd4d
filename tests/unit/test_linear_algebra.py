# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Factorizations and triangular systems as decompositions, against LAPACK's; nothing is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from retrograd.frontend.decompositions import DECOMPOSITIONS
from retrograd.frontend.decompositions.matrices import cholesky

aten = torch.ops.aten
FUNCTIONS = {entry.op: entry.function for entry in DECOMPOSITIONS}
SHAPES = [(1, 1), (4, 4), (2, 3, 5, 5), (0, 0), (2, 0, 3, 3)]
OBLONG = [*SHAPES, (6, 3), (3, 6), (2, 5, 1), (1, 4), (0, 3), (3, 0)]


def matrix(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    a = matrix(*shape)
    return a @ a.mT + torch.eye(shape[-1], dtype=a.dtype)


def check(op: Any, *args: Any, **kwargs: Any) -> None:
    """The entry for ``op`` against the op, in every result's shape, dtype and values."""
    ours, theirs = FUNCTIONS[op](*args, **kwargs), op(*args, **kwargs)
    pairs = [(ours, theirs)] if isinstance(ours, Tensor) else list(zip(ours, theirs, strict=True))
    for mine, reference in pairs:
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("upper", [False, True])
def test_cholesky(shape: tuple[int, ...], upper: bool) -> None:
    a, b = positive(*shape), matrix(*shape[:-1], 2)
    factor = torch.linalg.cholesky(a, upper=upper)
    # What lies in the other triangle is not read.
    other = torch.triu(a) if upper else torch.tril(a)
    check(aten.linalg_cholesky_ex.default, other, upper=upper)
    check(aten.cholesky.default, a, upper)
    check(aten.cholesky_solve.default, b, factor, upper)
    check(aten.cholesky_inverse.default, factor, upper)


def test_cholesky_says_which_minor_is_not_positive() -> None:
    a = torch.stack([positive(4, 4), torch.diag(torch.tensor([1.0, 1.0, -1.0, 1.0], dtype=torch.float64))])
    factor, info = cholesky.cholesky_ex(a)
    assert info.tolist() == torch.linalg.cholesky_ex(a).info.tolist() == [0, 3]
    assert factor[0].isfinite().all() and factor[1].isnan().any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("unit", [False, True])
def test_triangular_systems(shape: tuple[int, ...], upper: bool, unit: bool) -> None:
    a = matrix(*shape) + 4 * torch.eye(shape[-1], dtype=torch.float64)
    tall, wide = matrix(*shape[:-1], 2), matrix(*shape[:-2], 2, shape[-1])
    check(aten.linalg_solve_triangular.default, a, tall, upper=upper, unitriangular=unit)
    check(aten.linalg_solve_triangular.default, a, wide, upper=upper, left=False, unitriangular=unit)
    for transposed in (False, True):
        check(aten.triangular_solve.default, tall, a, upper, transposed, unit)


def test_triangular_systems_broadcast() -> None:
    check(aten.linalg_solve_triangular.default, matrix(3, 4, 4), matrix(2, 1, 4, 2), upper=False)
    check(aten.linalg_solve_triangular.default, matrix(2, 1, 4, 4), matrix(4, 2), upper=True)


@pytest.mark.parametrize("shape", OBLONG)
def test_lu(shape: tuple[int, ...]) -> None:
    a = matrix(*shape)
    check(aten.linalg_lu_factor_ex.default, a)
    check(aten.linalg_lu.default, a)
    packed, pivots = torch.linalg.lu_factor(a)
    for wanted in ((True, True), (True, False), (False, True)):
        check(aten.lu_unpack.default, packed, pivots, *wanted)


@pytest.mark.parametrize("shape", SHAPES)
def test_lu_solves(shape: tuple[int, ...]) -> None:
    a, tall, wide = matrix(*shape), matrix(*shape[:-1], 2), matrix(*shape[:-2], 2, shape[-1])
    packed, pivots = torch.linalg.lu_factor(a)
    for adjoint in (False, True):
        check(aten.linalg_lu_solve.default, packed, pivots, tall, adjoint=adjoint)
        check(aten.linalg_lu_solve.default, packed, pivots, wide, left=False, adjoint=adjoint)
    for matrices in (a, a.mT):
        check(aten._linalg_solve_ex.default, matrices, tall)
        check(aten._linalg_solve_ex.default, matrices, wide, left=False)
        check(aten.linalg_inv_ex.default, matrices)
        check(aten._linalg_det.default, matrices)
        check(aten._linalg_slogdet.default, matrices)


def test_systems_with_a_vector() -> None:
    check(aten._linalg_solve_ex.default, matrix(4, 4), matrix(4))
    check(aten._linalg_solve_ex.default, matrix(3, 4, 4), matrix(3, 4))


def test_a_singular_matrix() -> None:
    a = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    # LAPACK, and which one PyTorch has depends on the processor, chooses among the factors behind a pivot of zero.
    packed, pivots, info = FUNCTIONS[aten.linalg_lu_factor_ex.default](a)
    torch.testing.assert_close(torch.linalg.multi_dot(torch.lu_unpack(packed, pivots)), a)
    assert int(info) == int(torch.linalg.lu_factor_ex(a).info) != 0
    assert float(FUNCTIONS[aten._linalg_det.default](a)[0]) == float(torch.det(a)) == 0
    assert [float(part) for part in FUNCTIONS[aten._linalg_slogdet.default](a)[:2]] == [0, -torch.inf]
    inverse, info = FUNCTIONS[aten.linalg_inv_ex.default](a)
    assert int(info) == int(torch.linalg.inv_ex(a).info) != 0
    assert not inverse.isfinite().all()


@pytest.mark.parametrize("shape", OBLONG)
def test_qr(shape: tuple[int, ...]) -> None:
    a = matrix(*shape)
    check(aten.geqrf.default, a)
    for mode in ("reduced", "complete", "r"):
        check(aten.linalg_qr.default, a, mode)
    check(aten.geqrf.default, torch.triu(a))


@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 5, 5), (6, 3), (2, 5, 1)])
def test_products_of_reflections(shape: tuple[int, ...]) -> None:
    vectors, factors = torch.geqrf(matrix(*shape))
    check(aten.linalg_householder_product.default, vectors, factors)
    check(aten.linalg_householder_product.default, vectors, factors[..., :-1])
    tall, wide = matrix(*shape[:-1], 2), matrix(*shape[:-2], 2, shape[-2])
    for transposed in (False, True):
        check(aten.ormqr.default, vectors, factors, tall, True, transposed)
        check(aten.ormqr.default, vectors, factors, wide, False, transposed)


def test_large_and_complex_matrices_are_kept() -> None:
    large = torch.empty(cholesky.MOST_ROWS + 1, cholesky.MOST_ROWS + 1, device="meta")
    for op in (aten.linalg_cholesky_ex.default, aten.linalg_inv_ex.default, aten.linalg_qr.default):
        assert FUNCTIONS[op](large) is NotImplemented
        assert FUNCTIONS[op](torch.empty(2, 2, dtype=torch.complex64, device="meta")) is NotImplemented


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matrix_exp(dtype: torch.dtype) -> None:
    """Matrices of small and large norms in one batch, beside the exponential in f64; nothing at all."""
    function = FUNCTIONS[aten.linalg_matrix_exp.default]
    sizes = torch.tensor([0.0, 1e-3, 1.0, 6.0, 60.0, 1e4], dtype=torch.float64)[:, None, None]
    a = (matrix(6, 5, 5) - 3 * torch.eye(5)) * sizes
    found, expected = function(a.to(dtype)), torch.linalg.matrix_exp(a.to(dtype).double())
    tolerance = 2e-5 if dtype is torch.float32 else 1e-11
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert found.dtype is dtype
    assert function(a * 1e6)[-1].isnan().all()
    assert function(a[:, :0, :0]).shape == (6, 0, 0)
    assert function(torch.zeros(200, 200)) is NotImplemented
