# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The order in which PyTorch's engine executes the nodes of an autograd graph.

Compiled autograd visits nodes depth first; the engine keeps those that are ready in a heap, and takes the one that the
forward made last (``CompareNodeTaskTime`` in torch/csrc/autograd/engine.cpp). Hooks are called in the engine's order,
so the order of a capture is put right by this one. Nodes of equal priority (every ``AccumulateGrad`` has the highest)
leave a heap in an order of its own: the heap here makes the moves that libstdc++'s makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass(frozen=True)
class NodeGraph:
    """An autograd graph as numbers: node 0 is the root; ``edges[n]`` are n's successors in order, ready or not,
    ``priorities[n]`` is n's sequence number, ``names[n]`` what PyTorch calls it, ``nodes[n - 1]`` PyTorch's own."""

    edges: Sequence[Sequence[int]]
    priorities: Sequence[int]
    names: Sequence[str]
    nodes: Sequence[Any] = ()

    def dependencies(self) -> list[int]:
        """For each node, how many edges lead to it."""
        counts = [0] * len(self.edges)
        for successors in self.edges:
            for successor in successors:
                counts[successor] += 1
        return counts


def read_node_graph(roots: Sequence[Any], inputs: Sequence[Any]) -> NodeGraph:
    """The part of the autograd graph that a backward from ``roots`` executes; with ``inputs``, what leads to those."""
    first = [find_edge(root).node for root in roots]
    successors: dict[Any, list[Any]] = {}
    pending = list(first)
    while pending:
        node = pending.pop()
        if node not in successors:
            successors[node] = [following for following, _ in node.next_functions if following is not None]
            pending.extend(successors[node])
    executed = _leading_to(successors, {find_edge(tensor).node for tensor in inputs}) if inputs else set(successors)
    numbers = {node: 1 + i for i, node in enumerate(n for n in successors if n in executed)}
    edges = [[numbers[n] for n in first if n in executed]]
    edges += [[numbers[s] for s in successors[node] if s in executed] for node in numbers]
    priorities = [0, *(node._sequence_nr() for node in numbers)]
    return NodeGraph(edges, priorities, ["GraphRoot", *map(name_of, numbers)], tuple(numbers))


def capture_order(graph: NodeGraph) -> list[int]:
    """The nodes in the order in which compiled autograd numbers them: depth first, each once all before it are done."""
    waiting, order, stack = graph.dependencies(), [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        for successor in graph.edges[node]:
            waiting[successor] -= 1
            if not waiting[successor]:
                stack.append(successor)
    return order


def engine_order(graph: NodeGraph) -> list[int]:
    """The nodes in the order in which the engine executes them on one thread."""
    waiting, order = graph.dependencies(), []
    heap: list[tuple[int, int]] = [(graph.priorities[0], 0)]
    while heap:
        node = _pop(heap)
        order.append(node)
        for successor in graph.edges[node]:
            waiting[successor] -= 1
            if not waiting[successor]:
                _push(heap, (graph.priorities[successor], successor))
    return order


def name_of(node: Any) -> str:
    """Returns what PyTorch calls a node. A custom function's may have a ``name`` of its user's besides."""
    name: str = type(node).name(node)
    return name


def find_edge(tensor: Any) -> GradientEdge:
    """Where the gradient of a tensor, or of such an edge as a tuple, comes into the graph."""
    if not isinstance(tensor, torch.Tensor):
        return GradientEdge(*tensor)
    if tensor.grad_fn is None and (tensor.is_nested or tensor.layout is not torch.strided):
        # PyTorch's function asks a leaf for a view, which those that are not strided have not.
        with torch.enable_grad():
            return GradientEdge(*_successors(tensor.clone())[0])
    return get_gradient_edge(tensor)


def _successors(tensor: torch.Tensor) -> Sequence[Any]:
    """The successors of the node that made a tensor."""
    node = tensor.grad_fn
    assert node is not None
    return node.next_functions


def _leading_to(successors: Mapping[Any, Sequence[Any]], targets: set[Any]) -> set[Any]:
    predecessors: dict[Any, list[Any]] = {node: [] for node in successors}
    for node, following in successors.items():
        for successor in following:
            predecessors[successor].append(node)
    found, pending = set(), [t for t in targets if t in successors]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(predecessors[node])
    return found


def _push(heap: list[tuple[int, int]], item: tuple[int, int]) -> None:
    """std::push_heap: the new item rises past those of lower priority."""
    heap.append(item)
    _rise(heap, len(heap) - 1, item)


def _pop(heap: list[tuple[int, int]]) -> int:
    """std::pop_heap: the hole at the top sinks to the bottom, and the last item rises from there."""
    top, last = heap[0], heap.pop()
    if not heap:
        return top[1]
    hole, size = 0, len(heap)
    while (right := 2 * hole + 2) < size:
        child = right - 1 if heap[right][0] < heap[right - 1][0] else right
        heap[hole], hole = heap[child], child
    if right == size:
        heap[hole], hole = heap[right - 1], right - 1
    _rise(heap, hole, last)
    return top[1]


def _rise(heap: list[tuple[int, int]], hole: int, item: tuple[int, int]) -> None:
    while hole and heap[(hole - 1) // 2][0] < item[0]:
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = item
