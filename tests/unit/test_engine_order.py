# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The order in which the engine executes nodes, against the engine's own."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.frontend.autograd.engine.engine_order import capture_order, engine_order, read_node_graph


def executed(roots: list[torch.Tensor], nodes: list[Any], inputs: list[torch.Tensor]) -> list[int]:
    """The nodes in the order in which PyTorch runs them, by their numbers in the graph."""
    log: list[int] = []
    handles = [node.register_prehook(lambda _, n=number: log.append(n)) for number, node in enumerate(nodes)]
    torch.autograd.backward(roots, inputs=inputs or None, retain_graph=True)
    for handle in handles:
        handle.remove()
    return log


def nodes_in_order(roots: list[torch.Tensor]) -> list[Any]:
    """The nodes in the order in which the graph numbers them from 1 on (all are executed)."""
    found: dict[Any, None] = {}
    pending: list[Any] = [root.grad_fn for root in roots]
    while pending:
        node = pending.pop()
        if node not in found:
            found[node] = None
            pending.extend(following for following, _ in node.next_functions if following is not None)
    return list(found)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Ops on values by number; the first three are leaves."""
    count = draw(st.integers(1, 12))
    op = st.sampled_from(["add", "mul", "sin", "cat"])
    return [(draw(op), draw(st.integers(0, 2 + i)), draw(st.integers(0, 2 + i))) for i in range(count)]


def run(program: list[tuple[str, int, int]]) -> list[torch.Tensor]:
    values = [torch.ones(1, requires_grad=True) for _ in range(3)]
    for op, a, b in program:
        x, y = values[a], values[b]
        results = {"add": x + y, "mul": x * y, "sin": x.sin(), "cat": torch.cat([x, y, x])[:1]}
        values.append(results[op])
    return values


@settings(max_examples=150, deadline=None)
@given(programs(), st.integers(1, 3))
def test_every_graph_runs_in_the_engines_order(program: list[tuple[str, int, int]], count: int) -> None:
    roots = run(program)[-count:]
    roots = [root for root in roots if root.grad_fn is not None]
    log = executed(roots, nodes_in_order(roots), [])
    graph = read_node_graph(roots, [])
    assert [n - 1 for n in engine_order(graph)[1:]] == log


@settings(max_examples=50, deadline=None)
@given(programs())
def test_a_capture_meets_each_node_once_after_those_before_it(program: list[tuple[str, int, int]]) -> None:
    graph = read_node_graph([run(program)[-1]], [])
    order = capture_order(graph)
    places = {node: place for place, node in enumerate(order)}
    assert sorted(order) == list(range(len(graph.edges)))
    assert all(places[n] < places[s] for n, successors in enumerate(graph.edges) for s in successors)


def test_with_inputs_only_what_leads_to_them_is_executed() -> None:
    a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    graph = read_node_graph([a.sin() * b.cos()], [a])
    assert sorted(graph.names) == ["GraphRoot", "MulBackward0", "SinBackward0", "torch::autograd::AccumulateGrad"]
