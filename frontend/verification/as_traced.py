# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A graph as PyTorch traced it, before any pass of ours: what a first call is measured by.

The graph that compiled code stands for went through ``PREPARE``, and what ``bwd-cse`` merged was merged in it too. What
one of these did wrong is no difference between the two. It is one from this graph, which runs in torch besides where
the two cannot be seen to be the same.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import arg_tree_leaves

from retrograd.frontend.doors.absent_tangents import tangents_of_results, without_tangents
from retrograd.frontend.doors.deferred_code import make_graph_module
from retrograd.frontend.layers.random_ops import find_seed
from retrograd.frontend.layers.streams import share_seed, take_streams
from retrograd.frontend.verification.registered_kernels import describe_kernels, find_ops


class OtherThanTraced(Exception):
    """The compiled graph is another one than was traced; of this call nothing has run, as can be seen
    afterwards. The message says which result differs."""


@dataclass(frozen=True)
class AsTraced:
    """A traced graph, the first ``outputs`` of whose results are the forward's, and the others gradients; without the
    tangents ``absent``, by name. ``behind`` are the tangents without which eager has no gradient, of each gradient."""

    module: GraphModule
    outputs: int
    absent: frozenset[str] = field(default=frozenset())
    behind: tuple[frozenset[str], ...] | None = None

    def without(self, absent: frozenset[str]) -> AsTraced:
        """The same for a loss that leaves out these tangents."""
        return replace(self, absent=absent) if absent else self

    def forward(self) -> GraphModule:
        """The graph of the outputs; it takes all arguments, and looks at the forward's."""
        return _part(self.module, slice(None, self.outputs))

    def gradients(self) -> GraphModule:
        """The graph of the gradients, from the forward's arguments and the tangents."""
        module = _part(self.module, slice(self.outputs, None))
        return without_tangents(module, self.absent) if self.absent else module

    def tangents_of_gradients(self) -> Sequence[frozenset[str]]:
        """The tangents that each gradient depends on."""
        return tangents_of_results(self.module, self.outputs) if self.behind is None else self.behind

    @cached_property
    def digest(self) -> str:
        """A digest of the graph, constants included."""
        found = hashlib.sha256(f"{self.outputs}{sorted(self.absent)}".encode())
        for node in self.module.graph.nodes:
            found.update(f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}\n".encode())
            if node.op == "get_attr":
                found.update(repr(_content(_attribute(self.module, node))).encode())
        return found.hexdigest()

    @cached_property
    def kernels(self) -> str | None:
        """A digest of the kernels that it runs with in torch, if all are PyTorch's."""
        return describe_kernels(find_ops(self.module.graph))

    def has_outputs_of(self, forward: GraphModule) -> bool:
        """Whether the first results of a forward are computed by the same ops from the same arguments: by value
        numbering of both, so that what was merged is seen to be the same where it is."""
        numbers: dict[tuple[str, ...], int] = {}
        theirs, ours = (_number(module, numbers) for module in (self.module, forward))
        pairs = zip(_results(self.module)[: self.outputs], _results(forward), strict=False)
        return all(_key(a, theirs) == _key(b, ours) for a, b in pairs)


def copy_graph(graph_module: GraphModule) -> GraphModule:
    """The graph as it is now, with constants and metadata that are the same objects."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, copies))
    return make_graph_module(graph_module, graph)


def draw_alike(graph_module: GraphModule, prepared: GraphModule) -> None:
    """Have random ops draw what those of the same names draw in the prepared graph, in place."""
    if find_seed(graph_module.graph) is None:
        return
    share_seed(graph_module)
    take_streams(graph_module.graph, prepared.graph)


def arguments_of(module: GraphModule, named: Mapping[str, Any]) -> list[Any] | str:
    """The arguments of a graph by the names of its placeholders; ``None`` for those that nothing looks at. As text, the
    name of one that is not there."""
    placeholders = module.graph.find_nodes(op="placeholder")
    absent = next((node.name for node in placeholders if node.users and node.name not in named), None)
    return [named.get(node.name) for node in placeholders] if absent is None else absent


def has_effects(node: Node) -> bool:
    """Whether to run an op twice is to do something twice; drawing a seed is undone."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function":
        return False
    return (schema is not None and schema.is_mutable) or "with_effects" in str(node.target)


def _part(module: GraphModule, places: slice) -> GraphModule:
    """The graph of some of the results, with what leads to them and what does something else than give a result; it
    takes all arguments."""
    results = _results(module)[places]
    needed = {result for result in results if isinstance(result, Node)}
    for node in reversed(module.graph.nodes):
        if node in needed or node.op == "placeholder" or has_effects(node):
            needed.update((node, *node.all_input_nodes))
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[r] if isinstance(r, Node) else r for r in results))
    return make_graph_module(module, graph)


def _results(module: GraphModule) -> list[Any]:
    (output,) = module.graph.find_nodes(op="output")
    return list(arg_tree_leaves(*output.args))


def _number(module: GraphModule, numbers: dict[tuple[str, ...], int]) -> dict[Node, int]:
    """For each value a number, which values of other graphs have that are computed in the same way."""
    found: dict[Node, int] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            key: tuple[str, ...] = ("placeholder", node.name)
        elif node.op == "get_attr":
            key = ("get_attr", repr(_content(_attribute(module, node))))
        else:
            key = (node.op, str(node.target), _key(node.args, found), _key(node.kwargs, found))
            if not _is_function(node):
                key = (*key, node.name)
        found[node] = numbers.setdefault(key, len(numbers))
    return found


def _is_function(node: Node) -> bool:
    """Whether equal operands give equal results: no op that draws numbers does, nor one that is not known."""
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


def _key(value: Any, numbers: Mapping[Node, int]) -> str:
    return repr(map_aggregate(value, lambda leaf: _Number(numbers[leaf]) if isinstance(leaf, Node) else leaf))


class _Number(int):
    """The number of a value, which is written as no number is."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _attribute(module: GraphModule, node: Node) -> Any:
    return operator.attrgetter(str(node.target))(module)


def _content(value: Any) -> Sequence[Any]:
    """Describes a constant by its kind and its content, so that two can be compared."""
    if isinstance(value, GraphModule):
        return ("graph", str(value.graph))
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return ("object", id(value))
    with _disable_current_modes(), torch.no_grad():
        plain = value.detach().resolve_conj().resolve_neg().contiguous().cpu()
        held = hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return (str(value.dtype), tuple(value.shape), held)
