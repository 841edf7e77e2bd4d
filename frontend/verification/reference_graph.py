# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs the graph that a function was compiled from, op by op in torch, and judges by it what the function gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import arg_tree_leaves

from retrograd.frontend.doors.deferred_code import make_graph_module, recompile_when_called
from retrograd.frontend.doors.outputs import hint
from retrograd.frontend.layers.random_ops import UNIFORM, draw_seed, find_seed
from retrograd.frontend.libraries.run_as import RUN_AS
from retrograd.frontend.preparation.empty_tensors import gives_unwritten, leaves_unwritten
from retrograd.frontend.preparation.graph_memory import available_bytes, peak_bytes
from retrograd.frontend.python.source_locations import source_place
from retrograd.frontend.verification.as_traced import AsTraced
from retrograd.frontend.verification.compared_numbers import find_comparisons
from retrograd.frontend.verification.first_comparison import tolerance_of
from retrograd.frontend.verification.judgement import Difference, allowed_errors, find_difference, reruns, run_precise
from retrograd.frontend.verification.other_roundings import move_all
from retrograd.frontend.verification.random_states import random_states, set_random_states
from retrograd.frontend.verification.rounding import find_tolerances
from retrograd.frontend.verification.unwritten_memory import find_unset

# A collective op that one process of several runs once more waits for ever.
_COLLECTIVE = ("c10d", "_c10d_functional", "symm_mem")
# Of the memory that is free, what a check may take.
SHARE = 0.8


@dataclass(frozen=True)
class Others:
    """Other runs of a graph; ``restart`` is called before each, to have random ops draw what they drew."""

    module: GraphModule
    arguments: Sequence[Any]
    restart: Callable[[], None]

    def again(self) -> Iterator[list[Any] | None]:
        """The results with other precision and rounding, as :func:`reruns` has them."""
        for run in reruns(self.module, self.arguments, self.restart):
            yield None if run is None else arg_tree_leaves(run)

    def compare(self, places: Sequence[int]) -> Iterator[Sequence[Any]]:
        """The results at these places, which are no floats: as they are, and as rounding may have them."""
        found = find_comparisons(self.module, places)
        if found is not None:
            self.restart()
            yield from found.run(self.arguments, self._run_otherwise)

    def _run_otherwise(self, head: GraphModule) -> Sequence[Any]:
        """Runs a part of the graph in float64, or from arguments that are off by rounding."""
        self.restart()
        precise = run_precise(head, self.arguments)
        return head(*move_all(self.arguments)) if precise is None else precise

    def move(self) -> Sequence[Any]:
        """All results, from arguments that are off by rounding."""
        self.restart()
        return list(arg_tree_leaves(self.module(*move_all(self.arguments))))

    def find_unset(self, eager: Sequence[Any]) -> list[Tensor | None]:
        """Where the results, which are ``eager``, have memory that no op has written, as kernels leave what is past
        the end of a row: ``None`` for results without."""
        return find_unset(self._run_again, eager)

    def _run_again(self) -> list[Any]:
        self.restart()
        return list(arg_tree_leaves(self.module(*self.arguments)))


def _blank(results: Sequence[Any], unset: Sequence[Tensor | None]) -> list[Any]:
    """The results, with zeros where nothing was set."""
    return [r if mask is None else r.masked_fill(mask, 0) for r, mask in zip(results, unset, strict=True)]


@dataclass
class Graph:
    """A traced graph in the place of a compiled function: the same arguments, the same results.

    ``gradients`` says that the results are gradients; ``copied`` are arguments of which a copy is to be given, by the
    names of their nodes; ``fill_in`` makes of the arguments, of which some may be absent, those of the graph.
    ``traced`` is what the graph, or the step that it is half of, was before any pass of ours.
    """

    module: GraphModule
    gradients: bool
    copied: frozenset[str] = frozenset()
    fill_in: Callable[[Sequence[Any]], Sequence[Any]] = tuple
    traced: AsTraced | None = None
    runnable: GraphModule = field(init=False)

    def __post_init__(self) -> None:
        self.runnable = _on_any_strides(self.module)

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        """Run the graph op by op."""
        arguments = self.fill_in(tensors)
        # AOTAutograd traced what autocast does to the ops.
        with torch.no_grad(), torch._C._DisableAutocast():
            results = arg_tree_leaves(self.runnable(*arguments))
        given = {id(a) for a in arguments if isinstance(a, Tensor)}
        return [
            r.clone() if id(r) in given and isinstance(node, Node) and node.name in self.copied else r
            for r, node in zip(results, self.results(), strict=True)
        ]

    def results(self) -> list[Any]:
        """The nodes that are given; what is no node is a constant."""
        (output,) = self.module.graph.find_nodes(op="output")
        return list(arg_tree_leaves(*output.args))

    def find_difference(self, found: Sequence[Any], tensors: Sequence[Any], eager: Sequence[Any]) -> Difference | None:
        """How ``found`` differs from ``eager``, which :meth:`run` gives for ``tensors``; ``None`` where it does not."""
        arguments, before = self.fill_in(tensors), random_states(tensors)
        return self.judge(found, eager, Others(self.runnable, arguments, partial(set_random_states, before)))

    def judge(self, found: Sequence[Any], eager: Sequence[Any], others: Others) -> Difference | None:
        """Find a difference as :meth:`find_difference` does, by ``others``, other runs of the graph."""
        allowed = self.allowed()
        with torch.no_grad(), torch._C._DisableAutocast():
            difference = find_difference(found, eager, allowed, others.again, gradients=self.gradients, first=others)
            # What memory holds that no op has written, NaN or large numbers, would hide what differs elsewhere.
            unset = others.find_unset(eager) if difference is not None or self._allocates() else []
            if all(mask is None for mask in unset):
                return difference
            found, eager = _blank(found, unset), _blank(eager, unset)
            runs = (None if run is None else _blank(run, unset) for run in others.again())
            return find_difference(found, eager, allowed, lambda: runs, gradients=self.gradients)

    def _allocates(self) -> bool:
        """Whether the graph takes memory as it is."""
        return any(gives_unwritten(n.target) or leaves_unwritten(n.target) for n in self.module.graph.nodes)

    def allowed(self) -> list[float]:
        """The relative error that rounding explains of each result."""
        return allowed_errors(self.results(), find_tolerances(self.module.graph, tolerance_of))

    def describe(self, place: int) -> str:
        """A result, with the op that gives it and the user's line."""
        node = self.results()[place]
        if not isinstance(node, Node):
            return f"result {place}"
        at = source_place(node.stack_trace)
        op = str(node.target).removesuffix(".default") if node.op == "call_function" else "an argument"
        return f"{node.name} ({op}{f' at {at}' if at else ''})"


def has_collectives(module: GraphModule) -> bool:
    """Whether other processes take part when a graph runs."""
    return any(getattr(node.target, "namespace", "") in _COLLECTIVE for node in module.graph.nodes)


def _on_any_strides(graph_module: GraphModule) -> GraphModule:
    """The graph for arguments of other strides than it was traced with: what compiled code gives is contiguous. Ops
    that were traced as for another device run as libraries compute them on this one, and random numbers are drawn
    there: a seed is the CPU's, which took minutes for the masks of a T5."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for node in graph.nodes:
        node.target = RUN_AS.get(node.target, node.target)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    device = next((d for d in map(_device_of, graph.nodes) if d is not None and d.type != "cpu"), None)
    for node in graph.find_nodes(op="call_function", target=UNIFORM) if device is not None else ():
        seed = node.args[0]
        with graph.inserting_before(node):
            there = graph.call_function(torch.ops.aten._to_copy.default, (seed,), {"device": device})
        there.meta = dict(seed.meta)
        node.args = (there, *node.args[1:])
    return make_graph_module(graph_module, graph)


def _device_of(node: Node) -> torch.device | None:
    value = node.meta.get("val")
    return value.device if isinstance(value, Tensor) else None


def fix_seed(graph_module: GraphModule) -> GraphModule:
    """The graph with a seed, drawn now, as a constant; itself, where it draws none."""
    seed = find_seed(graph_module.graph)
    if seed is None:
        return graph_module
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    fixed = make_graph_module(graph_module, graph)
    fixed.register_buffer("_retrograd_seed", draw_seed())
    node = next(node for node in graph.nodes if node.name == seed.name)
    node.op, node.target, node.args = "get_attr", "_retrograd_seed", ()
    recompile_when_called(fixed)
    return fixed


def find_shortage(graph: Graph, device: torch.device, tensors: Sequence[Any]) -> str | None:
    """Why memory does not suffice for a check, if it does not: for copies of the arguments, the results of both, and
    what the graph needs in between."""
    available = available_bytes(device)
    if available is None:
        return None
    given = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
    placeholders = graph.module.graph.find_nodes(op="placeholder")
    traced = sum(_bytes_of(node) for node in placeholders)
    results = sum(_bytes_of(node) for node in graph.results() if isinstance(node, Node))
    # Open sizes may be larger than those of the trace.
    needed = int((peak_bytes(graph.module) + results) * max(1.0, given / traced if traced else 1.0)) + given
    if needed <= SHARE * available:
        return None
    return f"it would take {needed >> 20} MiB beside the step, and {available >> 20} MiB are free"


def _bytes_of(node: Node) -> int:
    value = node.meta.get("val")
    return hint(value.numel()) * value.element_size() if isinstance(value, Tensor) else 0
