# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Graph modules whose code is written when they are called: they run the graph as it is then."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch._functorch._aot_autograd import graph_compile
from torch._logging._internal import trace_log
from torch.fx import Graph, GraphModule

from retrograd.frontend.doors.deferred_code import make_graph_module, recompile_when_called
from retrograd.frontend.preparation.fx_partition import bind_traced

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


@pytest.mark.parametrize("read", [False, True])
def test_graphs_are_written_out_where_a_log_takes_them(read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[GraphModule] = []

    def write(graph_module: GraphModule, **_: object) -> str:
        written.append(graph_module)
        return ""

    monkeypatch.setattr(GraphModule, "print_readable", write)
    # PyTorch's own handler leaves with the first message, where there is nowhere to write.
    monkeypatch.setattr(trace_log, "handlers", [])
    monkeypatch.setattr(graph_compile.aot_graphs_log, "isEnabledFor", lambda _: read)
    model = torch.nn.Linear(2, 2)
    (output,) = bind_traced(model, (X,), None)([*model.parameters(), X])
    torch.testing.assert_close(output, model(X))
    assert bool(written) == read
