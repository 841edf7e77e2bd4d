# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is taken out of traced graphs: checks whose matrices are decomposed, and work on tensors without elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.decompositions.table import decomposition_table
from retrograd.frontend.preparation.empty_tensors import fill_empty_tensors
from retrograd.frontend.traceable.portable_ops import plain_checks

aten = torch.ops.aten


def trace(function: Any, *inputs: Tensor) -> torch.fx.GraphModule:
    with plain_checks():
        return make_fx(function, decomposition_table(), tracing_mode="fake")(*inputs)


def targets(graph: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_what_is_empty_is_a_constant() -> None:
    def joined(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        nothing = (x @ y.t()).sin().repeat(2, 1)
        return torch.cat([nothing, y.sum(1, keepdim=True).expand(-1, nothing.shape[1])]), nothing

    x, y = torch.randn(0, 3), torch.randn(2, 3)
    graph = trace(joined, x, y)
    expected = graph(x, y)
    names = {n.name for n in graph.graph.nodes}
    fill_empty_tensors(graph)
    assert {n.name for n in graph.graph.nodes} <= names
    found = targets(graph)
    assert aten.sin.default not in found and aten.mm.default not in found
    (join,) = graph.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert len(join.args[0]) == 1
    for ours, theirs in zip(graph(x, y), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_random_ops_without_elements_are_kept() -> None:
    """They are what the seed is counted by."""
    graph = torch.fx.Graph()
    drawn = graph.call_function(aten.rand.default, ([0],))
    graph.output(graph.call_function(aten.sin.default, (drawn,)))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(0)
    module = torch.fx.GraphModule({}, graph)
    fill_empty_tensors(module)
    assert targets(module) == [aten.rand.default, aten.full.default]
