# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Graph modules whose code is written when they are called: they run the graph as it is then."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, GraphModule

from retrograd.frontend.doors.deferred_code import make_graph_module, recompile_when_called

MAKERS: list[Callable[[torch.nn.Module, Graph], GraphModule]] = [GraphModule, make_graph_module]
X = torch.tensor([0.5, 2.0])


def make_graph() -> Graph:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.sin, (x,)))
    return graph


def put_cosine(graph_module: GraphModule) -> None:
    node = next(node for node in graph_module.graph.nodes if node.op == "call_function")
    node.target = torch.cos
    recompile_when_called(graph_module)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("called_before", [True, False])
def test_a_call_runs_the_graph_as_it_is(make: Callable[..., GraphModule], called_before: bool) -> None:
    graph_module = make(torch.nn.Module(), make_graph())
    # What somebody took before is not left behind either.
    forward = graph_module.forward
    if called_before:
        assert torch.equal(graph_module(X), X.sin())
    put_cosine(graph_module)
    copied = copy.deepcopy(graph_module)
    assert torch.equal(graph_module(X), X.cos())
    assert torch.equal(graph_module(X), X.cos())
    assert torch.equal(graph_module.forward(X), X.cos())
    assert torch.equal(copied(X), X.cos())
    if not called_before and make is make_graph_module:
        assert torch.equal(forward(X), X.cos())
    assert "torch.cos" in graph_module.code


@pytest.mark.parametrize("make", MAKERS)
def test_modules_do_not_share_it(make: Callable[..., GraphModule]) -> None:
    first, second = (make(torch.nn.Module(), make_graph()) for _ in range(2))
    put_cosine(first)
    assert torch.equal(second(X), X.sin())
    assert torch.equal(first(X), X.cos())


@pytest.mark.parametrize("make", MAKERS)
def test_no_code_is_written_before_a_call(make: Callable[..., GraphModule], monkeypatch: pytest.MonkeyPatch) -> None:
    graph_module, written = make(torch.nn.Module(), make_graph()), list[Graph]()
    original = Graph.python_code

    def count(graph: Graph, *args: object, **options: object) -> object:
        written.append(graph)
        return original(graph, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Graph, "python_code", count)
    for _ in range(3):
        put_cosine(graph_module)
    assert written == []
    for _ in range(3):
        graph_module(X)
    assert len(written) == 1
