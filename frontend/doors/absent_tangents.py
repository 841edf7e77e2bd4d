# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Calls of a backward from whose loss some of the outputs are absent. AOTAutograd's ``autograd.Function`` has autograd
make zeros of absent tangents. They are left undefined here, ``None``, and which of them are chooses the backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, TangentAOTInput

from retrograd.contract.sizes import evaluate_size
from retrograd.frontend.doors.deferred_code import make_graph_module
from retrograd.frontend.doors.function_changes import FunctionChange
from retrograd.frontend.sizes.size_expressions import to_shape
from retrograd.frontend.sizes.size_nodes import SYMBOLIC, find_axis

Call = Callable[..., list[Any]]
_TANGENT = "tangents"


class UndefinedTangents(FunctionChange):
    """Has what AOTAutograd builds in this thread get absent tangents as ``None``.

    Compiled autograd does not call what was built: it copies the backward's graph into its own, every op of it, behind
    a call of the function that puts its arguments in order (``_bw_prologue_fn``). There they are zeros, which
    ``fill_in`` makes, to be set when the joint graph is split. Releases of PyTorch before 2.13 cannot be changed:
    absent tangents are zeros there, as AOTAutograd makes them.
    """

    def __init__(self) -> None:
        self.fill_in: Callable[[list[Any]], list[Any]] = list
        # Of each thread, the node of autograd's that is running.
        self._state = threading.local()

    def may_be_undefined(self, place: int) -> bool:
        """Whether the running backward may give no gradient for an argument of its forward.

        Eager would not come to the argument, but what leads to it runs here in any case: autograd calls hooks with
        ``None``, which they do not expect. An argument that is no leaf may have hooks that cannot be seen.
        """
        node = getattr(self._state, "node", None)
        if node is None or place >= len(node.next_functions):
            return False
        edge = node.next_functions[place][0]
        leaf = getattr(edge, "variable", None)
        return edge is None or (leaf is not None and not leaf._backward_hooks and not leaf._post_accumulate_grad_hooks)

    def _change(self, function: Any) -> Any:
        forward, backward, prologue = function.forward, function.backward, function._bw_prologue_fn

        def forward_undefined(ctx: Any, *tensors: Any) -> Any:
            ctx.set_materialize_grads(False)
            return forward(ctx, *tensors)

        def backward_undefined(ctx: Any, *gradients: Any) -> Any:
            self._state.node = ctx
            try:
                return backward(ctx, *gradients)
            finally:
                self._state.node = None

        def ordered(*given: Any) -> list[Any]:
            arguments: list[Any] = prologue(*given)
            return self.fill_in(arguments) if getattr(self._state, "node", None) is None else arguments

        function.forward, function.backward = staticmethod(forward_undefined), staticmethod(backward_undefined)
        function._bw_prologue_fn = ordered
        return function


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether a node of a joint graph or of its backward is a tangent."""
    return node.op == "placeholder" and node.name.startswith(_TANGENT)


def tangents_behind(graph_module: torch.fx.GraphModule) -> dict[torch.fx.Node, frozenset[str]]:
    """The tangents, by name, that each node of a graph depends on."""
    behind: dict[torch.fx.Node, frozenset[str]] = {}
    for node in graph_module.graph.nodes:
        own = frozenset((node.name,)) if is_tangent(node) else frozenset()
        operands = {behind[operand] for operand in node.all_input_nodes if behind[operand]}
        behind[node] = own.union(*operands) if own or len(operands) != 1 else next(iter(operands))
    return behind


def tangents_of_results(graph_module: torch.fx.GraphModule, first: int) -> list[frozenset[str]]:
    """The same of the results of a graph, from the ``first`` on."""
    behind, results = tangents_behind(graph_module), graph_module.graph.output_node().args[0]
    return [behind[r] if isinstance(r, torch.fx.Node) else frozenset() for r in list(results)[first:]]  # type: ignore[arg-type]


def leave_out_updates(joint: torch.fx.GraphModule, first: int, examples: Sequence[Any]) -> None:
    """Have a joint graph, whose gradients begin at ``first``, give none for leaves that the model only updates.

    A leaf that requires grad is updated where gradients are off, as the weights of a teacher are: autograd does not see
    it. AOTAutograd takes what it is updated to for an output, and its gradient for that of zeros. ``examples`` are the
    graph's primals.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    leaves = {
        node.meta.get("desc")
        for node, example in zip(placeholders, examples, strict=False)
        if isinstance(example, torch.Tensor) and example.requires_grad and example.is_leaf
    }
    outputs = {n.name: n.meta["desc"].output for n in placeholders if isinstance(n.meta.get("desc"), TangentAOTInput)}
    updates = {
        name
        for name, output in outputs.items()
        if isinstance(output, InputMutationAOTOutput) and output.mutated_input in leaves
    }
    output = joint.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    for place, behind in enumerate(tangents_of_results(joint, first) if updates else (), first):
        if behind and behind <= updates:
            results[place] = None
    output.args = (tuple(results),)


# Additions, whose operand at one place stays without the one at another.
_KEEPS: dict[Any, dict[int, int]] = {torch.ops.aten.add.Tensor: {0: 1, 1: 0}, torch.ops.aten.sub.Tensor: {1: 0}}


def without_tangents(graph_module: torch.fx.GraphModule, absent: Collection[str]) -> torch.fx.GraphModule:
    """The graph of a backward without tangents, by name, that are undefined as in autograd, not zero: what a variant is
    compared with, found by the rules of ``bwd-drop-tangents`` but on FX.

    It takes the same arguments, with anything in the place of the absent ones, and gives ``None`` for gradients that
    depend on these alone. Of values that are absent beside others only the shapes are looked at.
    """
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    results = torch.utils._pytree.arg_tree_leaves(graph.graph_copy(graph_module.graph, copies))
    output = graph.output(tuple(results))
    reached = {copy for copy in copies.values() if is_tangent(copy)}
    gone = {copy for copy in reached if copy.name in absent}
    for old, node in copies.items():
        node.meta = dict(old.meta)
        flowing = reached.intersection(node.all_input_nodes)
        if not flowing or isinstance(node.meta.get("val"), SYMBOLIC):
            continue
        reached.add(node)
        missing = flowing & gone
        if missing == flowing:
            gone.add(node)
        elif missing and (kept := _find_kept(node, missing)) is not None:
            node.replace_all_uses_with(kept)
        else:
            for operand in missing:
                with graph.inserting_before(node):
                    zeros = graph.call_function(torch.ops.aten.zeros_like.default, (operand,))
                node.replace_input_with(operand, zeros)
    # Where a sum has become one of its terms, that is the result.
    output.args = (tuple(None if result in gone else result for result in output.args[0]),)
    return make_graph_module(graph_module, graph)


def _find_kept(node: torch.fx.Node, missing: Collection[torch.fx.Node]) -> torch.fx.Node | None:
    """The operand that is left of a plain sum, of values of one type and shape, without a factor."""
    keeps = _KEEPS.get(node.target, {}) if len(node.args) == 2 and not node.kwargs else {}
    values = [n.meta["val"] for n in (node, *node.args) if isinstance(n, torch.fx.Node)]
    if len(values) != 3 or len({(v.dtype, str(v.shape)) for v in values}) != 1:
        return None
    left = [node.args[keeps[place]] for place in keeps if node.args[place] in missing]
    return next((kept for kept in left if isinstance(kept, torch.fx.Node) and kept not in missing), None)


def choosing(call: Call, tangents: Mapping[str, int], choose: Callable[[frozenset[str]], Call]) -> Call:
    """``call`` where all ``tangents``, which stand at these places among the arguments, are there; else what ``choose``
    gives for the names of the absent ones, asked once for each set of them."""
    places, others = tuple(tangents.values()), dict[frozenset[str], Call]()

    def run(tensors: list[Any]) -> list[Any]:
        for place in places:
            if tensors[place] is None:
                break
        else:
            return call(tensors)
        absent = frozenset(name for name, place in tangents.items() if tensors[place] is None)
        if absent not in others:
            others[absent] = choose(absent)
        return others[absent](tensors)

    return run


class ZeroMaker:
    """Makes zeros like values of a backward's graph, on ``device``, at each call; ``sizes`` are the open sizes of the
    trace, by the names of their nodes."""

    def __init__(self, graph: torch.fx.Graph, device: torch.device, sizes: Mapping[str, torch.SymInt]) -> None:
        self.device = device
        self._placeholders = graph.find_nodes(op="placeholder")
        self._names = {size.node.expr: name for name, size in sizes.items()}
        places = {node.name: place for place, node in enumerate(self._placeholders)}
        self._numbers = {name: places[name] for name in sizes if name in places}
        self._axes = {
            name: find_axis(self._placeholders, size.node.expr)
            for name, size in sizes.items()
            if name not in self._numbers
        }

    def read_sizes(self, tensors: Sequence[Any]) -> dict[str, int]:
        """The open sizes of a call with these arguments."""
        known = {name: tensors[place] for name, place in self._numbers.items()}
        return known | {name: tensors[at[0]].shape[at[1]] for name, at in self._axes.items() if at is not None}

    def zeros_like(self, node: torch.fx.Node) -> Callable[[Mapping[str, int]], torch.Tensor]:
        """Return a function from the open sizes to zeros like the value of ``node``."""
        value = node.meta["val"]
        shape, dtype = to_shape(value, self._names), value.dtype
        return lambda known: torch.zeros([evaluate_size(n, known) for n in shape], dtype=dtype, device=self.device)

    def filler(self) -> Callable[[Sequence[Any]], list[Any]]:
        """Return a function that puts zeros in the place of absent tangents among the arguments."""
        makers = {place: self.zeros_like(node) for place, node in enumerate(self._placeholders) if is_tangent(node)}

        def fill_in(tensors: Sequence[Any]) -> list[Any]:
            filled, known = list(tensors), self.read_sizes(tensors)
            for place, make in makers.items():
                if filled[place] is None:
                    filled[place] = make(known)
            return filled

        return fill_in
