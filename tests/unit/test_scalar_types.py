# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Numbers beside tensors are of the kind that the op computes in, and its results what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.preparation.scalar_types import match_scalars

aten, prims = torch.ops.aten, torch.ops.prims
FLOATS, WHOLE, TRUTH = torch.tensor([3.0, -2.5, 0.0]), torch.tensor([3, -2, 0]), torch.tensor([True, False, True])
HALVES = FLOATS.to(torch.bfloat16)


def _matched(model: Callable[..., Any], *args: Tensor) -> GraphModule:
    traced = make_fx(model, tracing_mode="fake")(*args)
    match_scalars(traced)
    traced.graph.lint()
    traced.recompile()
    return traced


def _mixed(traced: GraphModule) -> list[str]:
    """Ops with a number of another kind than they compute in, or beside truth values."""
    found = []
    for node in traced.graph.nodes:
        numbers = [v for v in (*node.args[1:], *node.kwargs.values()) if type(v) in (int, float)]
        if numbers and node.target is not aten.full.default:
            given, made = node.args[0].meta["val"].dtype, node.meta["val"].dtype
            kind = given if made is torch.bool else made
            if kind is torch.bool or any(isinstance(n, float) is not kind.is_floating_point for n in numbers):
                found.append(str(node))
    return found


@pytest.mark.parametrize(
    "model",
    [
        lambda x, n, t: (x + -1, x - 2, -3 * x, 1 - x, torch.add(x, x, alpha=-2), torch.sub(x, n, alpha=-1)),
        lambda x, n, t: (x <= 0, x > 0, x == 3, x != -2, x < 0.5, x >= -2.5),
        lambda x, n, t: (n <= 0.5, n > -2.0, n == 3, n != -2, n < 3.5, n >= 0.0),
        lambda x, n, t: (t == 1, t != 0, t > 0.5, t < 2),
        lambda x, n, t: (torch.add(n, 0.5, alpha=-1), torch.rsub(n, 1.5, alpha=-2), n + 1, n * -2),
        lambda x, n, t: (x % 2, x % -2, x % 1.5, n % 2),
    ],
)
@pytest.mark.parametrize("x", [FLOATS, HALVES, FLOATS.double()], ids=["f32", "bf16", "f64"])
def test_the_same_with_numbers_of_the_same_kind(model: Callable[..., Any], x: Tensor) -> None:
    traced = _matched(model, x, WHOLE, TRUTH)
    found, expected = traced(x, WHOLE, TRUTH), model(x, WHOLE, TRUTH)
    assert [v.dtype for v in found] == [v.dtype for v in expected]
    assert all(map(torch.equal, found, expected))
    assert not _mixed(traced)


def test_a_sum_of_conditions_is_either() -> None:
    traced = _matched(lambda t: (t + ~t) + torch.add(t, t, alpha=1), TRUTH)
    assert aten.add.Tensor not in {node.target for node in traced.graph.nodes}
    assert traced(TRUTH).all()


def test_what_is_of_one_kind_stays_as_it_is() -> None:
    traced = make_fx(lambda x, n: (x * 2.0 + x, n * 2 + n, n < 3, n + n, x < 0.5), tracing_mode="fake")(FLOATS, WHOLE)
    before = [(node.target, node.args, node.kwargs) for node in traced.graph.nodes]
    match_scalars(traced)
    assert [(node.target, node.args, node.kwargs) for node in traced.graph.nodes] == before


def test_sums_of_conditions_and_truth_values() -> None:
    def model(t: Tensor) -> tuple[Tensor, ...]:
        return t + True, t + False, t + t, torch.add(t, t.logical_not(), alpha=False), torch.add(t, ~t, alpha=True)

    traced = _matched(model, TRUTH)
    assert not traced.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert all(map(torch.equal, traced(TRUTH), model(TRUTH)))
