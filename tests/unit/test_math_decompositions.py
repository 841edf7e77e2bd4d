# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sorting, scans, scatters and special functions as decompositions, against eager; nothing is compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.decompositions import functions, numerics, sums
from retrograd.frontend.decompositions.places import sorting
from retrograd.frontend.decompositions.table import DECOMPOSITIONS, decomposition_table

aten = torch.ops.aten


def same(ours: Any, theirs: Any, tolerance: float = 0.0) -> None:
    pairs = [(ours, theirs)] if isinstance(ours, Tensor) else zip(ours, theirs, strict=True)
    for mine, reference in pairs:
        torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance, equal_nan=True)


def rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values with ties and, where there are such, NaN and infinities."""
    torch.manual_seed(0)
    x = (torch.randn(shape) * 2).round()
    if dtype is torch.bool:
        return x > 0
    x = x.to(dtype)
    if dtype.is_floating_point and x.numel() > 8:
        for place, value in ((1, math.nan), (3, math.nan), (5, math.inf), (7, -math.inf)):
            x.view(-1)[place] = value
    return x


ROWS = [((9,), 0), ((3, 7, 4), 1), ((2, 9), -1), ((), 0), ((4, 0), 1), ((3, 33), 1), ((33, 2), 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize(("shape", "dim"), ROWS)
def test_sort(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    """Values and places, ties in their order, NaN above all."""
    x = rows(shape, dtype)
    for descending in (False, True):
        expected = torch.sort(x, dim=dim, descending=descending, stable=True)
        same(sorting.sort(x, dim, descending), expected)
        same(sorting.sort_stable(x, stable=True, dim=dim, descending=descending), expected)


@pytest.mark.parametrize("largest", [False, True])
def test_topk(largest: bool) -> None:
    x = torch.randperm(44).reshape(4, 11).float()
    for k, dim in ((3, 1), (1, 0), (4, 0), (11, -1), (0, 1)):
        same(sorting.topk(x, k, dim, largest), torch.topk(x, k, dim, largest))


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_places_in_sorted_rows(dtype: torch.dtype, right: bool) -> None:
    """One row for each row of values or one for all, with ties; NaN belongs at the end."""
    torch.manual_seed(0)
    edges, values = torch.randint(6, (3, 7)).to(dtype), torch.randint(-1, 8, (3, 2)).to(dtype)
    if dtype is torch.float32:
        values[0, 0] = math.nan
    ordered, places = edges.sort(-1)
    for kind in ({}, {"out_int32": True}, {"side": "right" if right else "left"}):
        options: dict[str, Any] = {"right": right, **kind}
        same(sorting.searchsorted(ordered, values, **options), torch.searchsorted(ordered, values, **options))
        same(sorting.searchsorted(ordered[0], values, **options), torch.searchsorted(ordered[0], values, **options))
        found = sorting.searchsorted(edges, values, sorter=places, **options)
        same(found, torch.searchsorted(edges, values, sorter=places, **options))
    same(sorting.bucketize(values, ordered[0], right=right), torch.bucketize(values, ordered[0], right=right))
    same(sorting.bucketize(values[0, 1], ordered[0]), torch.bucketize(values[0, 1], ordered[0]))


def test_rows_too_long_are_kept() -> None:
    x = torch.empty(2, sorting.LONGEST + 1, device="meta")
    assert sorting.sort(x) is NotImplemented
    assert sorting.topk(x, 3) is NotImplemented


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_running_sums_of_exponentials(dim: int) -> None:
    x = rows((5, 7), torch.float32)
    finite = x.nan_to_num(0.0, 3.0, -3.0)
    same(sums.logcumsumexp(x, dim), torch.logcumsumexp(x, dim), 1e-6)
    same(sums.logcumsumexp(finite * 200, dim), torch.logcumsumexp(finite * 200, dim), 1e-6)


@pytest.mark.parametrize("length", [5, 8, 9, 10, 17])
def test_long_running_sums_of_exponentials(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into parts, which the last does not fill."""
    monkeypatch.setattr(sums, "LONGEST", 4)
    x = rows((2, length), torch.float32)
    for case in (x, x.nan_to_num(0.0, 3.0, -3.0) * 200, torch.full((1, length), -math.inf)):
        same(sums.logcumsumexp(case, 1), torch.logcumsumexp(case, 1), 1e-6)


def test_running_sums_and_products_of_a_scalar() -> None:
    x = torch.tensor(2.5)
    aten = torch.ops.aten
    same(sums.running(aten.cumprod.default)(x, 0), torch.cumprod(x, 0))
    same(sums.running(aten.cumsum.default)(x.long(), 0), torch.cumsum(x.long(), 0))
    same(sums.logcumsumexp(x, 0), torch.logcumsumexp(x, 0))


@pytest.mark.parametrize("op", [aten.cumsum.default, aten.cumprod.default])
@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.uint8, torch.int64, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("source", [torch.float32, torch.int32, torch.uint8, torch.bool])
def test_running_sums_and_products_in_a_type_that_is_named(op: Any, dtype: torch.dtype, source: torch.dtype) -> None:
    x = torch.tensor([[3, 100, 1, 120], [7, 0, 90, 2]]).to(source)
    same(sums.running(op)(x, 1, dtype=dtype), op(x, 1, dtype=dtype))


def test_products_of_half_types_run_in_float32() -> None:
    x = torch.linspace(0.9, 1.1, 300).bfloat16()
    found = sums.running(torch.ops.aten.cumprod.default)(x, 0)
    same(found, x.float().cumprod(0).bfloat16())
    same(sums.running(torch.ops.aten.cumprod.default)(x, 0, dtype=torch.float64), x.cumprod(0, dtype=torch.float64))
    assert sums.running(torch.ops.aten.cumprod.default)(x.float(), 0) is NotImplemented


AROUND = torch.cat([torch.linspace(-9, 9, 1001, dtype=torch.float64), torch.tensor([-1e-3, 1e-5, 1e-8, 20.5, 35, 100])])
SPECIAL: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tensor, float, float]] = {
    # ours, eager's, where, relative error allowed in f64 and in f32
    "erf": (functions.erf, torch.erf, AROUND, 1e-14, math.inf),
    "tanh": (functions.tanh, torch.tanh, AROUND, 1e-14, math.inf),
    "erfc": (functions.erfc, torch.erfc, AROUND, 1e-13, 1e-5),
    "digamma": (functions.digamma, torch.digamma, AROUND[AROUND > 2], 1e-13, 1e-5),
    "lgamma": (functions.lgamma, torch.lgamma, AROUND[AROUND > 3], 1e-13, 1e-5),
    "log10": (functions.log10, torch.log10, AROUND[AROUND > 1.5], 1e-14, 1e-6),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_function(name: str) -> None:
    ours, theirs, points, double, single = SPECIAL[name]
    for dtype, allowed in ((torch.float64, double), (torch.float32, single)):
        if math.isinf(allowed):
            assert ours(points.to(dtype)) is NotImplemented
            continue
        found, expected = ours(points.to(dtype)), theirs(points.to(dtype).double())
        assert found.dtype == dtype
        # What underflows or overflows in f32 is not counted.
        ordinary = expected.to(dtype).isfinite() & (expected.abs() > 4 * torch.finfo(dtype).tiny)
        error = (found.double() - expected).abs() / expected.abs()
        assert float(error[ordinary].max()) < allowed


def test_special_values() -> None:
    edge = torch.tensor([-2.0, -1.0, 0.0, -0.0, 1.0, 2.0, math.inf])
    same(functions.erfc(edge), torch.erfc(edge), 1e-6)
    same(functions.digamma(edge[:6]), torch.digamma(edge[:6]), 1e-6)
    same(functions.lgamma(edge), torch.lgamma(edge), 1e-6)


def rewritten(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``op`` gives when it is traced with the table and run."""
    tensors = [a for a in args if isinstance(a, Tensor)]

    def call(*given: Tensor) -> Any:
        rest = iter(given)
        return op(*(next(rest) if isinstance(a, Tensor) else a for a in args), **kwargs)

    return make_fx(call, decomposition_table=decomposition_table(), tracing_mode="fake")(*tensors)(*tensors)


def test_scatters() -> None:
    x, source = torch.randn(4, 5), torch.randn(3, 6)
    index = torch.stack([torch.randperm(5) for _ in range(3)])
    for dim in (1, -1):
        arguments = (x, dim, index, source)
        same(rewritten(aten.scatter.src, *arguments), aten.scatter.src(*arguments))
        same(rewritten(aten.scatter.value, x, dim, index, 2.5), aten.scatter.value(x, dim, index, 2.5))
        repeated = (x, dim, index % 2, source)
        same(rewritten(aten.scatter_add.default, *repeated), aten.scatter_add.default(*repeated), 1e-6)
    scalar, zero = torch.tensor(1.5), torch.tensor(0)
    same(rewritten(aten.scatter_add.default, scalar, 0, zero, scalar), torch.tensor(3.0))
    empty = torch.empty(0, 5, dtype=torch.int64)
    same(rewritten(aten.scatter.src, x, 0, empty, x), x)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (aten._softmax.default, (0, False)),
        (aten._log_softmax.default, (-1, False)),
        (aten.cumsum.default, (0,)),
        (aten.amax.default, ([0], False)),
        (aten.amin.default, ([-1], True)),
        (aten.gather.default, (0, torch.tensor(0))),
        (aten.gather.default, (0, torch.tensor([0, 0]))),
        (aten.index_select.default, (0, torch.tensor([0]))),
        (aten.max.dim, (0,)),
    ],
)
def test_a_scalar_is_a_row_of_one(op: Any, arguments: tuple[Any, ...]) -> None:
    x = torch.tensor(-1.25)
    same(rewritten(op, x, *arguments), op(x, *arguments))


def test_products_of_nothing() -> None:
    for x, y in ((torch.ones(2, 0), torch.ones(0, 3)), (torch.ones(0, 2), torch.ones(2, 3))):
        same(rewritten(aten.mm.default, x, y), x @ y)
        same(rewritten(aten.bmm.default, x.unsqueeze(0), y.unsqueeze(0)), (x @ y).unsqueeze(0))


def test_gradients_of_a_bilinear_form_of_an_empty_batch() -> None:
    """The product of three: by each operand, the result summed over nothing is zeros of the weight's shape."""
    x, y, z, grad = torch.ones(0, 3), torch.ones(0, 4), torch.ones(5, 3, 4), torch.ones(0, 5)
    for arguments in (
        (x, z, y, [1, 3], [0], [1, 2], [2, 3]),
        (grad, z, y, [2, 3], [0], [1, 2], [1, 3]),
        (x, grad, y, [1, 3], [2, 3], [1, 2], [0]),
    ):
        graph = make_fx(aten._trilinear.default, decomposition_table=decomposition_table(), tracing_mode="fake")(
            *arguments
        )
        assert aten._trilinear.default not in {node.target for node in graph.graph.nodes}
        same(graph(*arguments), aten._trilinear.default(*arguments))


def test_logical_or_of_two_shapes() -> None:
    x, y = torch.tensor([1.0, 0.0, -2.0]), torch.tensor(False)
    same(rewritten(aten.logical_or.default, x, y), torch.logical_or(x, y))


def test_remaining_entries() -> None:
    """What PyTorch itself decomposes, through the table."""
    x, y = torch.randn(3, 4), torch.randn(4)
    same(rewritten(aten.addmv.default, torch.randn(3) * 0, x, y), x @ y, 1e-6)
    same(rewritten(aten.dist.default, x, x + 1), torch.dist(x, x + 1), 1e-6)
    same(rewritten(aten.narrow_copy.default, x, 1, 1, 2), x[:, 1:3])
    table = {entry.op: entry.function for entry in DECOMPOSITIONS}
    same(table[aten._efficientzerotensor.default]([2, 3], dtype=torch.float32), torch.zeros(2, 3))


def test_the_larger_number_of_two() -> None:
    x, y = torch.tensor([1.0, math.nan, 2.0, math.nan, -0.5]), torch.tensor([[math.nan], [1.5], [math.inf]])
    for op in (aten.fmax.default, aten.fmin.default):
        function = next(entry.function for entry in DECOMPOSITIONS if entry.op is op)
        same(function(x, y), op(x, y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", [0, 1])
def test_gradients_of_smooth_losses_are_rounded_once(reduction: int, dtype: torch.dtype) -> None:
    grad, x, y = torch.randn(3, 64, 9, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
    found = numerics.smooth_l1_loss_backward(grad, x, y, reduction, 0.7)
    expected = aten.smooth_l1_loss_backward(grad.double(), x.double(), y.double(), reduction, 0.7)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-7)
