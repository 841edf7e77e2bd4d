# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Has a backward's first call compute its gradients from the forward's arguments, not from what the compiled
forward saved: a fault that both halves share shows only there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import arg_tree_leaves

from retrograd.frontend.doors.absent_tangents import is_tangent
from retrograd.frontend.doors.deferred_code import make_graph_module
from retrograd.frontend.verification.as_traced import AsTraced, arguments_of, has_effects


@dataclass(frozen=True)
class ForwardRun:
    """A first call of a forward: its graph, its arguments with their versions, and the states of the random number
    generators before it. ``places`` say what it gave, by the names of the nodes. ``replace`` makes the graph run in
    torch from now on; given a text that says why the graph is wrong, it is not used at all."""

    module: GraphModule
    arguments: tuple[Any, ...]
    versions: tuple[int | None, ...]
    states: Any
    places: dict[str, tuple[int, torch.Size]]
    replace: Callable[[str | None], None]


class Forwards:
    """Remembers the forward's first call until the backward's; forgets it where what it saved is freed. ``is_settled``
    says that a backward passed before, for which none is needed."""

    def __init__(self) -> None:
        self._run: ForwardRun | None = None
        self._watched: weakref.ref[Any] | None = None
        self.is_settled = False

    def keep(
        self,
        module: GraphModule,
        arguments: Sequence[Any],
        states: Any,
        results: Sequence[Any],
        replace: Callable[[str | None], None],
    ) -> None:
        """Remember a call. What it computed, and no argument handed through, tells its backward from others'."""
        given = {id(a) for a in arguments}
        (output,) = module.graph.find_nodes(op="output")
        named = {
            node.name: result
            for node, result in zip(arg_tree_leaves(*output.args), results, strict=True)
            if isinstance(node, Node) and isinstance(result, Tensor) and id(result) not in given
        }
        if not named:
            return
        places = {name: (t.data_ptr(), t.shape) for name, t in named.items()}
        versions = tuple(_version(a) for a in arguments)
        self._run = ForwardRun(module, tuple(arguments), versions, states, places, replace)
        self._watched = weakref.ref(list(named.values())[-1], lambda _: self.forget())

    def forget(self) -> None:
        """Let go of the arguments."""
        self._run = self._watched = None

    def find(self, backward: GraphModule, tensors: Sequence[Any]) -> ForwardRun | None:
        """The call that saved these arguments of a backward; ``None`` where it is not known."""
        run = self._run
        if run is None:
            return None
        placeholders = backward.graph.find_nodes(op="placeholder")
        saved = [(run.places[n.name], t) for n, t in zip(placeholders, tensors, strict=False) if n.name in run.places]
        if not saved or any(not isinstance(t, Tensor) or (t.data_ptr(), t.shape) != place for place, t in saved):
            return None
        return run


def join(run: ForwardRun, backward: GraphModule, tensors: Sequence[Any]) -> tuple[GraphModule, tuple[Any, ...]] | str:
    """The gradients as one graph from the forward's arguments, and its arguments; says why, where there is none: an
    argument that they depend on was overwritten since, an op has effects, or the halves do not fit together."""
    forward = run.module.graph
    effect = next((node for node in forward.nodes if has_effects(node)), None)
    if effect is not None:
        return f"{effect.target} has effects"
    graph = torch.fx.Graph()
    made: dict[Node, Node] = {}
    graph.graph_copy(forward, cast(Any, made))
    own = {node.name: made[node] for node in forward.nodes if node in made}
    arguments = dict(zip([made[n] for n in forward.find_nodes(op="placeholder")], run.arguments, strict=False))
    values: dict[Node, Node] = {}
    # Placeholders precede what is computed, whichever half they come from.
    first = next((n for n in graph.nodes if n.op != "placeholder"), None)
    placeholders = backward.graph.find_nodes(op="placeholder")
    for node, tensor in zip(placeholders, tensors, strict=False):
        if node.name in own:
            values[node] = own[node.name]
        elif is_tangent(node):
            with graph.inserting_before(first):
                values[node] = graph.node_copy(node)
            arguments[values[node]] = tensor
        else:
            return f"{node.name} is no value of the forward"
    _merge(forward, made, backward.graph, values)
    graph.output(graph.graph_copy(backward.graph, cast(Any, values)))
    graph.eliminate_dead_code()
    changed = [
        made[node]
        for node, argument, version in zip(
            forward.find_nodes(op="placeholder"), run.arguments, run.versions, strict=False
        )
        if _version(argument) != version
    ]
    if any(node.users for node in changed):
        return "an argument of the forward was overwritten since"
    given = tuple(arguments[node] for node in graph.find_nodes(op="placeholder"))
    return make_graph_module(_attributes_of(run.module, backward), graph), given


def join_traced(
    run: ForwardRun, traced: AsTraced, backward: GraphModule, tensors: Sequence[Any]
) -> tuple[GraphModule, list[Any]] | str:
    """Join both halves as :func:`join` does, of the graph as it was traced, in which no pass of ours has changed
    anything."""
    module = traced.gradients()
    effect = next((node for node in module.graph.nodes if has_effects(node)), None)
    if effect is not None:
        return f"{effect.target} has effects"
    placeholders = run.module.graph.find_nodes(op="placeholder")
    named = dict(zip((node.name for node in placeholders), run.arguments, strict=False))
    tangents = zip(backward.graph.find_nodes(op="placeholder"), tensors, strict=False)
    named |= {node.name: tensor for node, tensor in tangents if is_tangent(node)}
    versions = dict(zip((node.name for node in placeholders), run.versions, strict=False))
    for node in module.graph.find_nodes(op="placeholder"):
        if node.users and node.name in versions and _version(named[node.name]) != versions[node.name]:
            return "an argument of the forward was overwritten since"
    arguments = arguments_of(module, named)
    return f"{arguments} is no argument of the forward" if isinstance(arguments, str) else (module, arguments)


def _merge(forward: torch.fx.Graph, made: dict[Node, Node], backward: torch.fx.Graph, values: dict[Node, Node]) -> None:
    """Have what the backward computes again be one value with the forward's: other rounding moves both alike."""
    named = {node.name: node for node in forward.nodes if node in made}
    for node in backward.nodes:
        other = named.get(node.name)
        if node.op != "call_function" or other is None or other.target is not node.target:
            continue
        taken = [values.get(n) for n in node.all_input_nodes]
        same = taken == [made[n] for n in other.all_input_nodes]
        if same and repr((node.args, node.kwargs)) == repr((other.args, other.kwargs)):
            values[node] = made[other]


def _attributes_of(forward: GraphModule, backward: GraphModule) -> torch.nn.Module:
    """A module with the constants of both halves."""
    both = torch.nn.Module()
    for module in (backward, forward):
        both.__dict__.update({k: v for k, v in module.__dict__.items() if k not in both.__dict__ and k[0] != "_"})
        both._buffers.update(module._buffers)
        both._parameters.update(module._parameters)
        both._modules.update(module._modules)
    return both


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None
