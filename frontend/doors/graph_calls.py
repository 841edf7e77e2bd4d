# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions with the signatures of AOTAutograd's graphs that call compiled ones in their place. Values are matched by
the names of FX nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from retrograd.frontend.doors.absent_tangents import (
    ZeroMaker,
    choosing,
    is_tangent,
    tangents_of_results,
    without_tangents,
)
from retrograd.frontend.doors.call_plan import Caller, CallPlan, Layout, Tensors
from retrograd.frontend.doors.moved_residuals import Moves, moving_backward, moving_forward
from retrograd.frontend.doors.outputs import find_order, hint, is_contiguous, result_strides
from retrograd.frontend.layers.random_ops import draw_seed, find_seed
from retrograd.frontend.preparation.narrowing import Packer
from retrograd.frontend.sizes.size_expressions import to_expression
from retrograd.frontend.sizes.size_nodes import find_axis, find_heads
from retrograd.frontend.verification.as_traced import AsTraced
from retrograd.frontend.verification.reference_graph import Graph

_CPU = torch.device("cpu")


class Check(Protocol):
    """Makes of what calls a function what checks its first call."""

    def __call__(self, call: Caller, graph: Graph, bind: Callable[[CompiledFunction], Caller]) -> Caller:
        """``call`` takes the arguments of ``graph``; ``bind`` makes one like it of another function."""


@dataclass(frozen=True)
class CompiledFunction:
    """A compiled function: FX names of its arguments and results, in order, and how to call it on tensors.

    ``copied`` are arguments of which it gives copies, because what they hold is overwritten before the backward.
    ``merged`` are values of the graph that the compiler found to be others', by name: it knows them by the latter.
    ``narrowed`` is how values are saved that are not saved as they are, by name. ``device`` is where its tensors are.
    ``without``, of a backward, gives the one to call where the tangents of these names are absent, or ``None`` where
    they are to be zeros; ``dropped`` are the gradients that such a one does not give. ``check`` makes of calls those
    whose first one is checked. ``moves`` says how it is called where residuals are on the host.
    """

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    copied: frozenset[str]
    call: Callable[[Tensors], Tensors]
    merged: Mapping[str, str] = field(default_factory=dict)
    narrowed: Mapping[str, Packer] = field(default_factory=dict)
    device: torch.device = _CPU
    without: Callable[[frozenset[str]], CompiledFunction | None] | None = None
    dropped: frozenset[str] = frozenset()
    check: Check | None = None
    moves: Moves | None = None


def backward_caller(
    graph_module: torch.fx.GraphModule,
    function: CompiledFunction,
    sizes: Mapping[str, torch.SymInt],
    may_be_undefined: Callable[[int], bool],
    traced: AsTraced | None = None,
) -> Caller:
    """As :func:`graph_caller`, for a backward some of whose tangents may be absent (``None``). Of the gradients that
    depend on these alone, those of which ``may_be_undefined`` says so of their place are ``None``, others zeros."""
    call = graph_caller(graph_module, function, restride=0, sizes=sizes, traced=traced)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    tangents = {node.name: place for place, node in enumerate(placeholders) if is_tangent(node)}
    without = function.without
    if without is None or len(tangents) < 2:
        return call
    behind = tangents_of_results(graph_module, 0) if traced is None else traced.tangents_of_gradients()
    taken = frozenset(function.arguments)
    known = {name: place for name, place in tangents.items() if name in taken.union(*behind)}
    zeros = ZeroMaker(graph_module.graph, function.device, sizes)
    (output,) = graph_module.graph.find_nodes(op="output")
    gradients = torch.utils._pytree.arg_tree_leaves(*output.args)

    def choose(absent: frozenset[str]) -> Callable[..., list[Any]]:
        fill_in, dropped_names = zeros.filler(), frozenset[str]()
        other = without(absent & taken) if absent & taken else function
        if other is None or other is function:
            part: Caller = lambda tensors: call(list(fill_in(tensors)))  # noqa: E731
        else:
            dropped_names = other.dropped
            part = graph_caller(
                graph_module, other, restride=0, sizes=sizes, absent=absent & taken, fill_in=fill_in, traced=traced
            )
        undefined = [bool(names) and names <= absent for names in behind]
        nodes = [(i, g) for i, g in enumerate(gradients) if isinstance(g, torch.fx.Node)]
        more = [place for place, node in nodes if undefined[place] and node.name not in dropped_names]
        dropped = [(p, zeros.zeros_like(node), undefined[p]) for p, node in nodes if node.name in dropped_names]

        def run(tensors: list[Any]) -> list[Any]:
            known = zeros.read_sizes(tensors) if dropped else {}
            results = part(tensors)
            for place, make, is_undefined in dropped:
                if not (is_undefined and may_be_undefined(place)):
                    results[place] = make(known)
            for place in more if other is not None else ():
                if may_be_undefined(place):
                    results[place] = None
            return results

        return run

    return choosing(call, known, choose)


def graph_caller(
    graph_module: torch.fx.GraphModule,
    function: CompiledFunction,
    *,
    restride: int,
    sizes: Mapping[str, torch.SymInt] | None = None,
    absent: frozenset[str] = frozenset(),
    fill_in: Callable[[Sequence[Any]], Sequence[Any]] = tuple,
    traced: AsTraced | None = None,
) -> Caller:
    """Return a function that calls ``function`` on the graph's arguments and returns the graph's results; its first
    call is checked if that is wanted. The first ``restride`` results get the strides of the trace. ``sizes`` are the
    open sizes of the whole trace, by the names of their nodes; ``fill_in`` puts zeros in the place of the tangents that
    are ``absent``; ``traced`` is the whole graph before it was prepared, by which it is checked."""
    bind = partial(_plain_caller, graph_module, restride=restride, sizes=sizes)
    call = bind(function)
    if function.check is not None:
        # A forward's results have strides to restore; a backward's are gradients.
        reference = without_tangents(graph_module, absent) if absent else graph_module
        if function.narrowed and not restride:
            # What was saved in a narrower type gives other gradients, as the user wants.
            traced = None
        as_traced = None if traced is None else traced.without(absent)
        graph = Graph(reference, not restride, function.copied, fill_in, as_traced)
        call = function.check(call, graph, bind)
    moves = function.moves
    if moves is None:
        return call
    moving = None if moves.call is None else bind(replace(function, call=moves.call))
    if restride:
        return call if moving is None else moving_forward(call, moving, moves)
    placeholders = enumerate(graph_module.graph.find_nodes(op="placeholder"))
    return moving_backward(call, moving, moves, [place for place, node in placeholders if node.name in moves.values])


def _plain_caller(
    graph_module: torch.fx.GraphModule,
    function: CompiledFunction,
    *,
    restride: int,
    sizes: Mapping[str, torch.SymInt] | None = None,
) -> Caller:
    """Make a :func:`graph_caller` that checks nothing."""
    plan, more = _plan_call(graph_module, function, restride, sizes or {})
    return plan.caller(function.call, more)


def fixed_plan(
    graph_module: torch.fx.GraphModule, function: CompiledFunction, restride: int
) -> tuple[CallPlan, bool] | None:
    """How ``function`` is called in the place of a graph without open sizes, as data, and whether it takes a seed;
    ``None`` where the graph has open sizes."""
    if find_heads(graph_module.graph):
        return None
    plan, more = _plan_call(graph_module, function, restride, {})
    return (plan, bool(more)) if not plan.heads else None


def _plan_call(
    graph_module: torch.fx.GraphModule, function: CompiledFunction, restride: int, sizes: Mapping[str, torch.SymInt]
) -> tuple[CallPlan, list[Callable[[Sequence[Any]], Any]]]:
    places, more = _argument_places(graph_module.graph, function.device, sizes)
    (output,) = graph_module.graph.find_nodes(op="output")
    nodes = torch.utils._pytree.arg_tree_leaves(*output.args)
    taken = [places[name] for name in function.arguments]
    index = {name: i for i, name in enumerate(function.results)}
    # Each result of the graph: an argument handed through, or a result of the compiled function.
    handed = {name: place for name, place in places.items() if name not in function.copied}
    absent = handed.keys() | function.dropped
    through = [handed.get(node.name) if isinstance(node, torch.fx.Node) else None for node in nodes]
    numbers = [_number_expression(node, sizes) for node in nodes]
    computed = [
        index[n.name] if isinstance(n, torch.fx.Node) and n.name not in absent and number is None else None
        for n, number in zip(nodes, numbers, strict=True)
    ]
    has_numbers = any(number is not None for number in numbers)
    heads = {name: places[name] for name in sizes if name in places} if has_numbers else {}
    # None where there is no gradient, or a size that the graph was specialized on.
    constants = [None if isinstance(node, torch.fx.Node) else node for node in nodes]
    strides = [_strides_of(node) if i < restride else None for i, node in enumerate(nodes)]
    # What a forward saves stays where the backward reads it.
    seen = range(min(restride or len(nodes), len(nodes))) if function.device.type == "cuda" else ()
    on_host = [place for place in seen if computed[place] is not None and _is_on_host(nodes[place])]
    return CallPlan(taken, through, computed, numbers, constants, strides, heads, on_host), more


def _is_on_host(node: Any) -> bool:
    value = _value_of(node)
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _value_of(node: Any) -> Any:
    """Returns the value of a result of a graph in the trace; None where no node gives it."""
    return node.meta.get("val") if isinstance(node, torch.fx.Node) else None


def _argument_places(
    graph: torch.fx.Graph, device: torch.device, sizes: Mapping[str, torch.SymInt]
) -> tuple[dict[str, int], list[Callable[[Sequence[Any]], Any]]]:
    """Where among the arguments of a call each named value stands; and what a seed and sizes, which follow them, are
    drawn or read with at each call."""
    placeholders = graph.find_nodes(op="placeholder")
    places = {node.name: i for i, node in enumerate(placeholders)}
    more: list[Callable[[Sequence[Any]], Any]] = []
    seed = find_seed(graph)
    if seed is not None:
        places[seed.name] = len(places)
        more.append(lambda _: draw_seed().to(device))
    for name, size in sizes.items():
        if name not in places and (place := find_axis(placeholders, size.node.expr)) is not None:
            places[name] = len(places)
            more.append(partial(_read_size, *place))
    return places, more


def size_values(graph_module: torch.fx.GraphModule) -> dict[str, torch.SymInt]:
    """The open sizes of a traced graph by the names of their nodes."""
    return {node.name: node.meta["val"] for node in find_heads(graph_module.graph)}


def _number_expression(node: Any, sizes: Mapping[str, torch.SymInt]) -> Any:
    """A result that is a number of sizes, as an expression over the names of their nodes."""
    value = _value_of(node)
    if not isinstance(value, torch.SymInt):
        return None
    return to_expression(value.node.expr, {size.node.expr: name for name, size in sizes.items()})


def _read_size(argument: int, axis: int, tensors: Sequence[torch.Tensor]) -> int:
    return tensors[argument].shape[axis]


def _strides_of(node: Any) -> Layout | None:
    """The layout to restore, where it is not what a compiled function gives."""
    value = _value_of(node)
    if not isinstance(value, torch.Tensor) or is_contiguous(value):
        return None
    strides = result_strides(value)
    if all(isinstance(stride, int) for stride in strides):
        return tuple(hint(stride) for stride in strides)
    return find_order(strides)
