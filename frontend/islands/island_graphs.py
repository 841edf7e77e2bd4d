# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Eager islands as graphs: the graph with a call in the place of each, and each as a function by itself. An island
takes the open sizes of the whole graph, then tensors. Numbers that it needs of these sizes it works out itself."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from retrograd.contract.sizes import Size
from retrograd.frontend.doors.deferred_code import make_graph_module
from retrograd.frontend.hooks.hook_calls import HOOK_CALLS, hook_calls
from retrograd.frontend.hooks.pack_hooks import PACKED_AS
from retrograd.frontend.islands.island_choice import Island, is_random
from retrograd.frontend.layers.own_ops import define_op
from retrograd.frontend.libraries.joined_layers import WITH
from retrograd.frontend.libraries.ops import FLOPS, LIBRARY
from retrograd.frontend.libraries.run_as import RUN_AS
from retrograd.frontend.sizes.size_expressions import to_size
from retrograd.frontend.sizes.size_nodes import SIZE, SYMBOLIC, find_heads, find_names

# Shape, strides and offset.
TracedLayout: TypeAlias = tuple[tuple[Size, ...], tuple[Size, ...], Size]


@dataclass(frozen=True)
class IslandProgram:
    """An island as a function of numbers and tensors: ``module`` gives a tuple. ``sizes`` are the names of the numbers,
    ``layouts`` shape, strides and offset of each tensor as traced: numbers, or expressions over these names."""

    module: GraphModule
    sizes: tuple[str, ...]
    layouts: tuple[TracedLayout, ...]


def outline_islands(graph_module: GraphModule, islands: Sequence[Island]) -> GraphModule:
    """A copy of the graph in which each island is one call of ``retrograd::island`` with its number; what the island
    gives keeps its names."""
    if not islands:
        return graph_module
    groups = _find_groups(graph_module, islands)
    group_of = {node: number for number, group in enumerate(groups) for node in group}
    graph = Graph()
    copies: dict[Node, Node] = {}
    for item in _order(graph_module, groups, group_of):
        if isinstance(item, Node):
            copies[item] = graph.node_copy(item, lambda n: copies[n])
            copies[item].meta = dict(item.meta)
        else:
            _call_island(graph, item, groups[item], copies)
    # Numbers that only islands need are no part of what is compiled.
    graph.eliminate_dead_code(lambda node: node.is_impure() or not isinstance(node.meta.get("val"), SYMBOLIC))
    return make_graph_module(graph_module, graph)


def extract_islands(graph_module: GraphModule, islands: Sequence[Island]) -> list[IslandProgram]:
    """Each island as a function; the order of arguments and results is that of the calls in `outline_islands`."""
    return [_extract(graph_module, group) for group in _find_groups(graph_module, islands)]


def _find_groups(graph_module: GraphModule, islands: Sequence[Island]) -> list[list[Node]]:
    nodes = {n.name: n for n in graph_module.graph.nodes}
    return [[nodes[name] for name in island.nodes] for island in islands]


def _boundary(group: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """The tensors that a group takes from outside and gives to it. Constants among the module's attributes are part of
    it."""
    inside = set(group)
    taken = dict.fromkeys(
        n
        for node in group
        for n in node.all_input_nodes
        if n not in inside and n.op != "get_attr" and not isinstance(n.meta.get("val"), SYMBOLIC)
    )
    given = [n for n in group if any(user not in inside for user in n.users)]
    return [*taken], [n for n in given if isinstance(n.meta.get("val"), torch.Tensor)]


def _order(
    graph_module: GraphModule, groups: Sequence[Sequence[Node]], group_of: Mapping[Node, int]
) -> Iterable[Node | int]:
    """Nodes and numbers of groups, each after what it needs, else in the graph's order, a group where its last node
    is."""
    place = {n: i for i, n in enumerate(graph_module.graph.nodes)}
    units: list[Node | int] = [n for n in place if n not in group_of]
    units += range(len(groups))
    keys = {u: max(place[n] for n in groups[u]) if isinstance(u, int) else place[u] for u in units}
    unit_of: dict[Node, Node | int] = {n: group_of.get(n, n) for n in place}
    needs = {
        u: {unit_of[i] for n in (groups[u] if isinstance(u, int) else [u]) for i in n.all_input_nodes} - {u}
        for u in units
    }
    users: dict[Node | int, list[Node | int]] = {u: [] for u in units}
    for unit, needed in needs.items():
        for source in needed:
            users[source].append(unit)
    missing = {u: len(needed) for u, needed in needs.items()}
    by_key = {key: unit for unit, key in keys.items()}
    heap = [keys[u] for u in units if not missing[u]]
    heapq.heapify(heap)
    while heap:
        unit = by_key[heapq.heappop(heap)]
        yield unit
        for user in users[unit]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(heap, keys[user])


def _call_island(graph: Graph, number: int, group: Sequence[Node], copies: dict[Node, Node]) -> None:
    taken, given = _boundary(group)
    sizes = find_heads(group[0].graph)
    random = any(map(is_random, group))
    arguments = ([copies[n] for n in sizes], [copies[n] for n in taken], number, random)
    call = graph.create_node("call_function", ISLAND, arguments, name=f"retrograd_island_{number}")
    call.meta = {"val": [n.meta["val"] for n in given], "stack_trace": group[0].stack_trace}
    if all(LIBRARY in n.meta for n in group if n.target is not operator.getitem):
        # It gives the same again: what the user or a plan asks for may have it computed a second time.
        tagged = {k: v for n in group if WITH not in n.meta for k, v in n.meta.items() if k in _TAGS}
        call.meta |= {FLOPS: sum(n.meta.get(FLOPS, 0) for n in group), **tagged}
    call.meta[PACKED_AS] = [next(iter(n.meta.get(PACKED_AS, ())), "") for n in given]
    for index, node in enumerate(given):
        copies[node] = graph.create_node("call_function", operator.getitem, (call, index), name=node.name)
        copies[node].meta = {k: v for k, v in node.meta.items() if k not in _TAGS}


# What the user asks of the ops of a checkpointed block: what an island gives is never computed a second time, but for
# what a library computes.
_TAGS = ("recompute", "ac_graph_id")


def _extract(graph_module: GraphModule, group: Sequence[Node]) -> IslandProgram:
    taken, given = _boundary(group)
    sizes = find_heads(graph_module.graph)
    graph = Graph()
    copies = {n: graph.placeholder(n.name) for n in (*sizes, *taken)}
    for node in group:
        for needed in node.all_input_nodes:
            _copy_number(graph, needed, copies)
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].target = RUN_AS.get(node.target, node.target)
    graph.output(tuple(copies[n] for n in given))
    names = find_names(graph_module.graph)
    layouts = tuple(_layout(n.meta["val"], names) for n in taken)
    module = make_graph_module(graph_module, graph)
    # It has the hooks that it calls.
    module.meta[HOOK_CALLS] = hook_calls(group)
    return IslandProgram(module, tuple(n.meta[SIZE] for n in sizes), layouts)


def _copy_number(graph: Graph, node: Node, copies: dict[Node, Node]) -> None:
    """Copy what an island needs besides tensors: a constant of the module, or a number with all that it is worked out
    from."""
    if node in copies or not (node.op == "get_attr" or isinstance(node.meta.get("val"), SYMBOLIC)):
        return
    for needed in node.all_input_nodes:
        _copy_number(graph, needed, copies)
    copies[node] = graph.node_copy(node, lambda n: copies[n])


def _layout(tensor: torch.Tensor, names: Mapping[sympy.Symbol, str]) -> TracedLayout:
    shape, stride = (tuple(to_size(n, names) for n in numbers) for numbers in (tensor.shape, tensor.stride()))
    return shape, stride, to_size(tensor.storage_offset(), names)


def _refuse_to_run(*_: Any) -> NoReturn:
    raise RuntimeError("retrograd::island stands for ops that run in torch, in a graph to be imported; it does not run")


ISLAND = define_op("island(int[] sizes, Tensor[] values, int number, bool random) -> Tensor[]", _refuse_to_run, None)
