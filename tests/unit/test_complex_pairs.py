# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Complex numbers as pairs: each rule beside eager, transforms of random sizes beside torch.fft, what stays complex."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.complex_numbers.fourier import LARGEST_MATRIX, LARGEST_PRIME, find_factor, transform
from retrograd.frontend.complex_numbers.pair import Pair, absolute, divide
from retrograd.frontend.complex_numbers.split import CONSTANTS, RULES, is_border, split_complex

aten, prims = torch.ops.aten, torch.ops.prims
C64, C128 = torch.complex64, torch.complex128


def split(function: Callable[..., Any], *inputs: Tensor) -> tuple[GraphModule, set[Any]]:
    """A traced function without complex numbers, and the ops that it had."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        graph_module = make_fx(function)(*(mode.from_tensor(t) for t in inputs))
    ops = {node.target for node in graph_module.graph.nodes}
    split_complex(graph_module)
    return graph_module, ops


def find_complex_ops(graph_module: GraphModule) -> list[str]:
    """Those that compute with complex numbers."""
    nodes = [n for n in graph_module.graph.nodes if n.op == "call_function" and not is_border(n)]
    return [n.name for n in nodes if any(t.is_complex() for t in traced([n, *n.all_input_nodes]))]


def traced(nodes: list[torch.fx.Node]) -> list[Tensor]:
    """What nodes give, as far as these are tensors."""
    found = torch.utils._pytree.tree_leaves([node.meta.get("val") for node in nodes])
    return [leaf for leaf in found if isinstance(leaf, Tensor)]


def assert_eagers(graph_module: GraphModule, function: Callable[..., Any], *inputs: Tensor) -> None:
    ours, eager = (torch.utils._pytree.tree_leaves(f(*inputs)) for f in (graph_module, function))
    for mine, expected in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, expected.resolve_conj().resolve_neg(), rtol=1e-9, atol=1e-10)


PLACES = torch.tensor([2, 0])
GRID = torch.tensor([[0, 2, 1], [1, 0, 2]])
MASK = torch.tensor([[True, False, True]])
LIKE = {"dtype": C128}
# Of complex z and w and real x, all [3, 3].
PARTWISE: dict[Any, Callable[[Tensor, Tensor, Tensor], Any]] = {
    aten.view.default: lambda z, w, x: aten.view.default(z, [9, 1]),
    aten._unsafe_view.default: lambda z, w, x: aten._unsafe_view.default(z, [9]),
    aten.permute.default: lambda z, w, x: aten.permute.default(z, [1, 0]),
    aten.transpose.int: lambda z, w, x: aten.transpose.int(z, 0, 1),
    aten.t.default: lambda z, w, x: aten.t.default(z),
    aten.expand.default: lambda z, w, x: aten.expand.default(z, [2, 3, 3]),
    aten.unsqueeze.default: lambda z, w, x: aten.unsqueeze.default(z, 1),
    aten.squeeze.default: lambda z, w, x: aten.squeeze.default(z[:1]),
    aten.squeeze.dim: lambda z, w, x: aten.squeeze.dim(z[:1], 0),
    aten.squeeze.dims: lambda z, w, x: aten.squeeze.dims(z[:1], [0, 1]),
    aten.slice.Tensor: lambda z, w, x: aten.slice.Tensor(z, 1, 0, 3, 2),
    aten.select.int: lambda z, w, x: aten.select.int(z, 1, 2),
    aten.alias.default: lambda z, w, x: aten.alias.default(z),
    aten.detach.default: lambda z, w, x: aten.detach.default(z),
    aten.clone.default: lambda z, w, x: aten.clone.default(z, memory_format=torch.contiguous_format),
    aten.lift_fresh_copy.default: lambda z, w, x: aten.lift_fresh_copy.default(z),
    aten.neg.default: lambda z, w, x: aten.neg.default(z),
    aten.sum.default: lambda z, w, x: aten.sum.default(z),
    aten.sum.dim_IntList: lambda z, w, x: aten.sum.dim_IntList(z.to(C64), [0], True, dtype=C128),
    aten.mean.default: lambda z, w, x: aten.mean.default(z),
    aten.mean.dim: lambda z, w, x: aten.mean.dim(z, [1]),
    aten.cumsum.default: lambda z, w, x: aten.cumsum.default(z, 0),
    aten.flip.default: lambda z, w, x: aten.flip.default(z, [0]),
    aten.roll.default: lambda z, w, x: aten.roll.default(z, [1], [0]),
    aten.repeat.default: lambda z, w, x: aten.repeat.default(z, [2, 1]),
    aten.index.Tensor: lambda z, w, x: aten.index.Tensor(z, [PLACES]),
    aten.index_select.default: lambda z, w, x: aten.index_select.default(z, 1, PLACES),
    aten.gather.default: lambda z, w, x: aten.gather.default(z, 1, GRID),
    aten.embedding.default: lambda z, w, x: aten.embedding.default(z, GRID),
    aten.unfold.default: lambda z, w, x: aten.unfold.default(z, 1, 2, 1),
    aten.diagonal.default: lambda z, w, x: aten.diagonal.default(z, 1),
    aten.diag_embed.default: lambda z, w, x: aten.diag_embed.default(z),
    aten.tril.default: lambda z, w, x: aten.tril.default(z),
    aten.triu.default: lambda z, w, x: aten.triu.default(z, 1),
    aten.split.Tensor: lambda z, w, x: aten.split.Tensor(z, 2, 0),
    aten.split_with_sizes.default: lambda z, w, x: aten.split_with_sizes.default(z, [1, 2], 1),
    aten.unbind.int: lambda z, w, x: aten.unbind.int(z, 1)[::2],
    aten.im2col.default: lambda z, w, x: aten.im2col.default(z[None], [2, 2], [1, 1], [0, 0], [1, 1]),
    aten.col2im.default: lambda z, w, x: aten.col2im.default(
        z.reshape(1, 9)[:, :8].reshape(1, 4, 2), [2, 3], [2, 2], [1, 1], [0, 0], [1, 1]
    ),
    aten.select_backward.default: lambda z, w, x: aten.select_backward.default(z, [3, 2, 3], 1, 1),
    aten.slice_backward.default: lambda z, w, x: aten.slice_backward.default(z, [3, 5], 1, 1, 4, 1),
    aten.diagonal_backward.default: lambda z, w, x: aten.diagonal_backward.default(z[0], [3, 3], 0, 0, 1),
    aten.cat.default: lambda z, w, x: aten.cat.default([z, x, w], 1),
    aten.stack.default: lambda z, w, x: aten.stack.default([z, w]),
    aten.scalar_tensor.default: lambda z, w, x: z * aten.scalar_tensor.default(2 + 1j, **LIKE),
    aten.trace.default: lambda z, w, x: aten.trace.default(z),
    aten.constant_pad_nd.default: lambda z, w, x: aten.constant_pad_nd.default(z, [1, 2], 3 + 4j),
    aten.slice_scatter.default: lambda z, w, x: aten.slice_scatter.default(z, x[:, :2], 1, 0, 2),
    aten.select_scatter.default: lambda z, w, x: aten.select_scatter.default(z, w[0], 0, 1),
    aten.diagonal_scatter.default: lambda z, w, x: aten.diagonal_scatter.default(z, w[0]),
    aten.copy.default: lambda z, w, x: aten.copy.default(z, x),
    aten.where.self: lambda z, w, x: aten.where.self(x > 0, z, x),
    aten.index_put.default: lambda z, w, x: aten.index_put.default(z, [PLACES], w[0], True),
    aten.index_add.default: lambda z, w, x: aten.index_add.default(z, 0, PLACES, w[:2]),
    aten.scatter.src: lambda z, w, x: aten.scatter.src(z, 1, GRID, w),
    aten.scatter.value: lambda z, w, x: aten.scatter.value(z, 1, GRID[:, :1], 2 - 1j),
    aten.scatter_add.default: lambda z, w, x: aten.scatter_add.default(z, 1, GRID, w),
    aten.masked_fill.Scalar: lambda z, w, x: aten.masked_fill.Scalar(z, MASK, 1j),
    aten.masked_fill.Tensor: lambda z, w, x: aten.masked_fill.Tensor(z, MASK, w[0, 0]),
    aten.full.default: lambda z, w, x: z + aten.full.default([3], 1 + 2j, **LIKE),
    aten.full_like.default: lambda z, w, x: aten.full_like.default(z, 1 - 2j),
    aten.new_full.default: lambda z, w, x: aten.new_full.default(z, [2], 3),
    aten.fill.Scalar: lambda z, w, x: aten.fill.Scalar(z, 1j),
    aten.fill.Tensor: lambda z, w, x: aten.fill.Tensor(z, w[0, 0]),
    aten.zeros.default: lambda z, w, x: z + aten.zeros.default([3, 3], **LIKE),
    aten.zeros_like.default: lambda z, w, x: aten.zeros_like.default(z),
    aten.new_zeros.default: lambda z, w, x: aten.new_zeros.default(x, [2], **LIKE),
    aten.empty.memory_format: lambda z, w, x: aten.empty.memory_format([3], **LIKE) * 0 + 1,
    aten.empty_like.default: lambda z, w, x: aten.copy.default(aten.empty_like.default(z), w),
    aten.empty_strided.default: lambda z, w, x: aten.copy.default(
        aten.empty_strided.default([3, 3], [3, 1], **LIKE), w
    ),
    aten.new_empty.default: lambda z, w, x: aten.copy.default(aten.new_empty.default(z, [3, 3]), w),
    aten.new_empty_strided.default: lambda z, w, x: aten.copy.default(
        aten.new_empty_strided.default(z, [3, 3], [3, 1]), w
    ),
    prims.squeeze.default: lambda z, w, x: prims.squeeze.default(z[:1], [0]),
    prims.split_dim.default: lambda z, w, x: prims.split_dim.default(z.reshape(9), 0, 3),
    prims.collapse.default: lambda z, w, x: prims.collapse.default(z, 0, 1),
    prims.collapse_view.default: lambda z, w, x: prims.collapse_view.default(z, 0, 1),
    prims.view_of.default: lambda z, w, x: prims.view_of.default(z),
    prims.transpose.default: lambda z, w, x: prims.transpose.default(z, [1, 0]),
    prims.broadcast_in_dim.default: lambda z, w, x: prims.broadcast_in_dim.default(z, [2, 3, 3], [1, 2]),
    prims.device_put.default: lambda z, w, x: prims.device_put.default(z, torch.device("cpu")),
}
ARITHMETIC: dict[Any, Callable[[Tensor, Tensor, Tensor], Any]] = {
    aten.complex.default: lambda z, w, x: aten.complex.default(x, -x),
    aten.polar.default: lambda z, w, x: aten.polar.default(x, x + 1),
    aten.view_as_complex.default: lambda z, w, x: aten.view_as_complex.default(x[:, :2].contiguous()),
    aten.view_as_real.default: lambda z, w, x: aten.view_as_real.default(z * w),
    prims.convert_element_type.default: lambda z, w, x: (
        prims.convert_element_type.default(x, C128) + prims.convert_element_type.default(z, C64),
        prims.convert_element_type.default(z, torch.float32),
    ),
    aten._to_copy.default: lambda z, w, x: (
        aten._to_copy.default(x.float(), dtype=C128),
        aten._to_copy.default(z),
        aten._to_copy.default(z, dtype=torch.float64),
    ),
    aten.ones.default: lambda z, w, x: z * aten.ones.default([3], **LIKE),
    aten.ones_like.default: lambda z, w, x: z + aten.ones_like.default(z),
    aten.new_ones.default: lambda z, w, x: z + aten.new_ones.default(x, [3], **LIKE),
    aten._conj.default: lambda z, w, x: aten._conj.default(z) * w,
    aten._conj_physical.default: lambda z, w, x: aten._conj_physical.default(z),
    aten.abs.default: lambda z, w, x: aten.abs.default(torch.cat([z * 1e200, z * 1e-200, z * 0])),
    aten.angle.default: lambda z, w, x: aten.angle.default(z),
    aten.add.Tensor: lambda z, w, x: (z + w, z + x, x + z, aten.add.Tensor(z, w, alpha=2j), torch.add(z, x, alpha=3)),
    aten.add.Scalar: lambda z, w, x: (aten.add.Scalar(z, 2), aten.add.Scalar(z, 2j), aten.add.Scalar(z, 2, 3)),
    aten.sub.Tensor: lambda z, w, x: (z - w, x - z, 1 - z, aten.sub.Tensor(z, x, alpha=2j)),
    aten.sub.Scalar: lambda z, w, x: aten.sub.Scalar(z, 1j),
    aten.rsub.Scalar: lambda z, w, x: (aten.rsub.Scalar(z, 2j), aten.rsub.Scalar(z, 1, 2)),
    aten.mm.default: lambda z, w, x: (torch.mm(z, w), torch.mm(z, w.t().conj())),
    aten.bmm.default: lambda z, w, x: torch.bmm(z[None], w[None]),
    aten.mv.default: lambda z, w, x: aten.mv.default(z, w[0]),
    aten.dot.default: lambda z, w, x: aten.dot.default(z[1], w[0]),
    aten.mul.Tensor: lambda z, w, x: (z * w, z * x, x * w, x * 2j, z * 3),
    aten.mul.Scalar: lambda z, w, x: (aten.mul.Scalar(z, 2 - 1j), aten.mul.Scalar(z, 2)),
    aten.div.Tensor: lambda z, w, x: (z / w, x / z, z / x, z / 2j, 1j / w, (z * 1e200) / (w * 1e200)),
    aten.div.Scalar: lambda z, w, x: aten.div.Scalar(z, 2j),
    aten.reciprocal.default: lambda z, w, x: aten.reciprocal.default(z),
    aten.pow.Tensor_Scalar: lambda z, w, x: [z**n for n in (-3, -1, 0, 1, 2, 7, 11, 0.5, 2.5, 1 + 2j)],
    aten.pow.Tensor_Tensor: lambda z, w, x: (z**w, x.abs() ** z, z**x, (z * 0) ** w.abs()),
    aten.pow.Scalar: lambda z, w, x: (2**z, (1 + 1j) ** z),
    aten.linalg_vector_norm.default: lambda z, w, x: aten.linalg_vector_norm.default(z, 2, [1], True),
    aten.var.correction: lambda z, w, x: aten.var.correction(z, [0], correction=1),
    aten.eq.Tensor: lambda z, w, x: aten.eq.Tensor(z, torch.where(x > 0, z, w)),
    aten.eq.Scalar: lambda z, w, x: aten.eq.Scalar(z * (x > 0), 0),
    aten.ne.Tensor: lambda z, w, x: aten.ne.Tensor(z, torch.where(x > 0, z, w)),
    aten.ne.Scalar: lambda z, w, x: aten.ne.Scalar(z * (x > 0), 0),
    aten.isnan.default: lambda z, w, x: aten.isnan.default(torch.complex(x.log(), x)),
    aten.sgn.default: lambda z, w, x: aten.sgn.default(z * (x > 0)),
    aten.exp.default: lambda z, w, x: torch.exp(z),
    aten.log.default: lambda z, w, x: torch.log(z),
    aten.log2.default: lambda z, w, x: torch.log2(z),
    aten.log10.default: lambda z, w, x: torch.log10(z),
    aten.log1p.default: lambda z, w, x: torch.log1p(z),
    aten.sqrt.default: lambda z, w, x: (torch.sqrt(z), torch.sqrt(z * 0), torch.sqrt(-z.abs() - 0j)),
    aten.rsqrt.default: lambda z, w, x: torch.rsqrt(z),
    aten.sin.default: lambda z, w, x: torch.sin(z),
    aten.cos.default: lambda z, w, x: torch.cos(z),
    aten.tan.default: lambda z, w, x: torch.tan(z),
    aten.sinh.default: lambda z, w, x: torch.sinh(z),
    aten.cosh.default: lambda z, w, x: torch.cosh(z),
    aten.tanh.default: lambda z, w, x: (torch.tanh(z), torch.tanh(z * 1000)),
    aten.tanh_backward.default: lambda z, w, x: aten.tanh_backward.default(z, w),
    aten.sigmoid.default: lambda z, w, x: torch.sigmoid(z),
    aten.sigmoid_backward.default: lambda z, w, x: aten.sigmoid_backward.default(z, w),
    aten._fft_r2c.default: lambda z, w, x: [aten._fft_r2c.default(x, [1, 0], n, n == 1) for n in range(3)],
    aten._fft_c2c.default: lambda z, w, x: [aten._fft_c2c.default(z, [0, 1], n, n == 1) for n in range(3)],
    aten._fft_c2r.default: lambda z, w, x: [aten._fft_c2r.default(z, [1, 0], n, 4 + n % 2) for n in range(3)],
}
CASES = PARTWISE | ARITHMETIC


@pytest.mark.parametrize("op", CASES, ids=str)
def test_rules(op: Any) -> None:
    torch.manual_seed(0)
    z, w = (torch.randn(3, 3, dtype=C128) for _ in range(2))
    x = torch.randn(3, 3, dtype=torch.float64)
    graph_module, ops = split(CASES[op], z, w, x)
    assert op in ops
    assert find_complex_ops(graph_module) == []
    assert_eagers(graph_module, CASES[op], z, w, x)


def test_each_rule_has_a_case() -> None:
    """But what no traced graph has while lazy conjugates and negatives are traced as they are."""
    lazy = {aten.resolve_conj.default, aten.resolve_neg.default, aten._neg_view.default}
    assert set(RULES) - set(CASES) == lazy


def test_a_rule_that_turns_an_input_away_leaves_the_op() -> None:
    """Half precision, which torch transforms on a few devices alone."""

    def spectrum(x: Tensor) -> Tensor:
        return torch.view_as_real(aten._fft_c2c.default(torch.complex(x, x), [0], 0, True).to(C64))

    graph_module, _ = split(spectrum, torch.ones(4, dtype=torch.float16))
    left = {n.name: n.target for n in graph_module.graph.nodes}
    ops = [left[name] for name in find_complex_ops(graph_module)]
    assert ops == [aten.view_as_complex.default, aten._fft_c2c.default, aten.view_as_real.default]


def test_what_has_no_rule_is_between_views() -> None:
    """Arguments and results too; of these alone, nothing is a pair that need not be."""

    def mixed(z: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        values = torch.linalg.eigvals(z * x)
        return values.abs(), values * 2, values, torch.linalg.inv(z.conj() + 1).real

    torch.manual_seed(1)
    z, x = torch.randn(3, 3, dtype=C128), torch.randn(3, 3, dtype=torch.float64)
    graph_module, _ = split(mixed, z, x)
    views = [n for n in graph_module.graph.nodes if is_border(n)]
    # Of z, of the values, of the inverse; for both decompositions, and for the second result.
    assert [str(n.target).split(".")[1] for n in views].count("view_as_real") == 3
    assert len(views) == 6
    assert_eagers(graph_module, mixed, z, x)


def test_constants_are_taken_apart_and_watched() -> None:
    constant = torch.randn(3, 3, dtype=C128)
    graph_module, _ = split(lambda x: x * constant.conj() + x * constant, torch.randn(3, 3, dtype=torch.float64))
    assert find_complex_ops(graph_module) == []
    assert not any(b.is_complex() for n in graph_module.graph.find_nodes(op="get_attr") for b in traced([n]))
    (watched,) = graph_module.meta[CONSTANTS]
    assert watched is constant or watched.data_ptr() == constant.data_ptr()


def test_other_graphs_are_left_alone() -> None:
    graph_module = make_fx(lambda x: x.sin() * 2, tracing_mode="fake")(torch.ones(3))
    before = [*graph_module.graph.nodes]
    split_complex(graph_module)
    assert [*graph_module.graph.nodes] == before


# -- Transforms -----------------------------------------------------------------------------------------------------


@given(
    n=st.one_of(st.integers(1, 300), st.sampled_from([509, 514, 720, 1000, 1021, 1024, 2018, 4096])),
    wanted=st.floats(0, 1),
    given_=st.floats(0, 1),
    inverse=st.booleans(),
    real=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_transforms_of_part_of_the_input_and_the_result(
    n: int, wanted: float, given_: float, inverse: bool, real: bool
) -> None:
    rows, columns = max(1, round(given_ * n)), max(1, round(wanted * n))
    x = torch.randn(2, rows, dtype=torch.float64 if real else C128, generator=torch.Generator().manual_seed(n))
    result = transform(x if real else Pair(x.real, x.imag), n, inverse=inverse, wanted=columns)
    whole = torch.fft.ifft(x, n, norm="forward") if inverse else torch.fft.fft(x, n)
    torch.testing.assert_close(torch.complex(result.re, result.im), whole[:, :columns], rtol=0, atol=1e-12 * n)


@given(st.integers(1, 1 << 20))
@settings(max_examples=300, deadline=None)
def test_factors_are_small_or_primes(n: int) -> None:
    factors = []
    while n > 1:
        factors.append(find_factor(n))
        assert n % factors[-1] == 0
        n //= factors[-1]
    assert all(f <= LARGEST_MATRIX or all(f % d for d in range(2, math.isqrt(f) + 1)) for f in factors)


def test_work_of_a_transform_grows_with_its_factors() -> None:
    """Of 4096 points, two products with matrices of 64 rows; a prime takes one matrix, or three longer transforms."""
    assert [find_factor(n) for n in (64, 4096, 127, LARGEST_PRIME + 1)] == [64, 64, 127, LARGEST_PRIME + 1]


def test_values_at_the_ends_of_a_type() -> None:
    large, tiny = torch.tensor([3e38, 0.0, math.inf]), torch.tensor([4e-38, 0.0, math.inf])
    assert torch.equal(absolute(Pair(large, tiny)), torch.tensor([3e38, 0.0, math.inf]))
    quotient = divide(Pair(large, large), Pair(large, large))
    assert quotient.re[0] == 1
    assert quotient.im[0] == 0
    assert quotient.re[1].isnan(), "as in eager"
