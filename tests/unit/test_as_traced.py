# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which graphs are seen to compute what the traced one computes, and what tells traced graphs apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.verification.as_traced import AsTraced, copy_graph

aten = torch.ops.aten
FIRST, SECOND, ALIKE = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0])


def trace(function: Callable[[Tensor], object]) -> GraphModule:
    return make_fx(function)(torch.ones(2))


def merge(graph_module: GraphModule, target: Any) -> GraphModule:
    """All ops of one kind are the first one."""
    merged = copy_graph(graph_module)
    first, *others = merged.graph.find_nodes(op="call_function", target=target)
    for other in others:
        other.replace_all_uses_with(first)
        merged.graph.erase_node(other)
    return merged


def summed(left: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor]) -> GraphModule:
    return trace(lambda x: left(x) + right(x).exp())


@pytest.mark.parametrize("other", [FIRST, ALIKE], ids=["itself", "a copy"])
def test_what_was_merged_rightly_is_the_same(other: Tensor) -> None:
    traced = summed(lambda x: x * FIRST, lambda x: x * other)
    merged = merge(traced, aten.mul.Tensor)
    assert len(merged.graph.nodes) < len(traced.graph.nodes)
    assert AsTraced(traced, 1).has_outputs_of(merged)


@pytest.mark.parametrize(
    ("left", "right", "target"),
    [
        (lambda x: x * FIRST, lambda x: x * SECOND, aten.mul.Tensor),
        (lambda x: x * 2, lambda x: x * 2.0, aten.mul.Tensor),
        (lambda x: x.sum(0), lambda x: x.sum(0, keepdim=True), aten.sum.dim_IntList),
        (torch.rand_like, torch.rand_like, aten.rand_like.default),
    ],
    ids=["constants", "numbers", "options", "random"],
)
def test_what_was_merged_wrongly_is_not(
    left: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor], target: object
) -> None:
    traced = summed(left, right)
    assert AsTraced(traced, 1).has_outputs_of(copy_graph(traced))
    assert not AsTraced(traced, 1).has_outputs_of(merge(traced, target))


def test_gradients_are_no_outputs() -> None:
    traced = trace(lambda x: (x.sin(), x.cos(), x.tanh()))
    changed = copy_graph(traced)
    (node,) = changed.graph.find_nodes(op="call_function", target=aten.tanh.default)
    node.target = aten.exp.default
    assert AsTraced(traced, 2).has_outputs_of(changed)
    assert not AsTraced(traced, 3).has_outputs_of(changed)
    x = torch.randn(2)
    torch.testing.assert_close([*AsTraced(traced, 2).forward()(x)], [x.sin(), x.cos()])
    torch.testing.assert_close([*AsTraced(traced, 2).gradients()(x)], [x.tanh()])


def test_constants_tell_graphs_apart() -> None:
    digests = [AsTraced(trace(partial(torch.mul, c)), 1).digest for c in (FIRST, ALIKE, SECOND)]
    assert digests[0] == digests[1] != digests[2]


def test_a_copy_stays_as_it_was() -> None:
    traced = trace(lambda x: x.sin())
    copied, x = copy_graph(traced), torch.randn(2)
    for node in traced.graph.find_nodes(op="call_function", target=aten.sin.default):
        assert isinstance(node, Node)
        node.target = aten.cos.default
    torch.testing.assert_close(copied(x), x.sin())
