# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which constants PyTorch computes once, and which stay computed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.preparation import rounded_constants
from retrograd.frontend.preparation.rounded_constants import fold_rounded_constants

aten = torch.ops.aten


def places(n: int = 9) -> Tensor:
    return torch.arange(1, n, dtype=torch.float32)


def folded(function: Callable[[Tensor], Tensor]) -> GraphModule:
    """The graph of a function of one tensor of eight numbers, folded."""
    graph_module = make_fx(function, tracing_mode="fake")(torch.ones(8))
    fold_rounded_constants(graph_module)
    graph_module.graph.lint()
    return graph_module


def constants_of(graph_module: GraphModule) -> list[Tensor]:
    return [getattr(graph_module, node.target) for node in graph_module.graph.find_nodes(op="get_attr")]


@pytest.mark.parametrize(
    ("decide", "held"),
    [
        (lambda r: (torch.log(r) / math.log(2)).to(torch.long), torch.int8),
        (lambda r: (torch.log(r) / math.log(2)).floor(), torch.float32),
        (lambda r: torch.log(r) > 1, torch.bool),
        (lambda r: (r * 100).to(torch.int32), torch.int16),
        (lambda r: (r * 1e6).to(torch.long), torch.int32),
        (lambda r: (r * 1e12).to(torch.long), torch.int64),
    ],
)
def test_what_rounds_a_constant_is_what_pytorch_computes(decide: Callable[[Tensor], Tensor], held: torch.dtype) -> None:
    graph_module = folded(lambda x: x * decide(places()))
    (constant,) = constants_of(graph_module)
    assert constant.dtype is held
    x = torch.arange(8.0)
    assert torch.equal(graph_module(x), x * decide(places()))
    targets = {node.target for node in graph_module.graph.nodes}
    assert not targets & {aten.log.default, aten.arange.start, aten.floor.default}


def test_the_last_of_several_decisions_is_the_constant_that_stays() -> None:
    graph_module = folded(lambda x: torch.where((places().log() > 1) | (places().exp() < 9), x, 2 * x))
    assert len(constants_of(graph_module)) == 2
    assert torch.equal(graph_module(torch.ones(8)), torch.ones(8))


@pytest.mark.parametrize(
    "stays",
    [
        lambda x: (x.log() * 3).floor(),
        lambda x: x * places().log(),
        lambda x: x * torch.arange(8),
        lambda x: x * (torch.arange(8) > 3),
        lambda x: x * torch.rand(8).round(),
        lambda x: x * torch.empty(8).to(torch.long).clamp(0, 0),
    ],
)
def test_what_depends_on_an_argument_is_a_float_or_is_random_stays(stays: Callable[[Tensor], Tensor]) -> None:
    before = make_fx(stays, tracing_mode="fake")(torch.ones(8))
    assert [n.target for n in folded(stays).graph.nodes] == [n.target for n in before.graph.nodes]


def test_a_large_constant_stays_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded_constants, "MOST_ELEMENTS", 7)
    assert constants_of(folded(lambda x: x * places().log().floor())) == []


def test_open_sizes_stay_computed() -> None:
    graph_module = make_fx(lambda x: x * places(x.shape[0] + 1).log().floor(), tracing_mode="symbolic")(torch.ones(8))
    fold_rounded_constants(graph_module)
    assert constants_of(graph_module) == []


def test_of_a_decision_on_a_decision_one_constant_is_left() -> None:
    graph_module = folded(lambda x: x * (places().log().floor() > 0.5))
    (constant,) = constants_of(graph_module)
    assert constant.tolist() == [False, False, True, True, True, True, True, True]


def test_what_no_constant_is_computed_from_stays_though_nothing_uses_it() -> None:
    """Sizes are written in terms of such nodes."""
    graph_module = make_fx(lambda x: x * places().log().floor(), tracing_mode="fake")(torch.ones(8))
    (x,) = graph_module.graph.find_nodes(op="placeholder")
    with graph_module.graph.inserting_after(x):
        unused = graph_module.graph.call_function(aten.sym_size.int, (x, 0))
    fold_rounded_constants(graph_module)
    assert unused in graph_module.graph.nodes
    assert len(constants_of(graph_module)) == 1
