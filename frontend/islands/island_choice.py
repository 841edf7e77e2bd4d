# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Eager islands: what of a graph is not compiled, and runs in torch.

An island is a connected piece of the graph. For the import it becomes one call of ``retrograd::island``
(``island_graphs.py``), a library op of any number of tensors in and out, so that the compiler sees what it takes and
gives and nothing of what it does.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._functorch._aot_autograd.descriptors import TangentAOTInput
from torch.fx import GraphModule, Node

from retrograd.frontend.complex_numbers.split import is_border
from retrograd.frontend.hooks.hook_calls import CALL_HOOKS
from retrograd.frontend.layers.biased_attention import BIASED_ATTENTION, BIASED_ATTENTION_BACKWARD
from retrograd.frontend.layers.ctc_loss import CTC_LOSS, CTC_LOSS_BACKWARD
from retrograd.frontend.layers.cudnn_layers import CUDNN_LAYERS
from retrograd.frontend.layers.lstm_layers import LSTM_LAYER, LSTM_LAYER_BACKWARD
from retrograd.frontend.libraries.joined_layers import WITH
from retrograd.frontend.libraries.ops import CHOICE, LIBRARY, LIBRARY_OPS, ROUNDING
from retrograd.frontend.python.source_locations import CaptureError, source_place
from retrograd.frontend.sizes.size_nodes import SYMBOLIC
from retrograd.frontend.traceable.portable_ops import CHECK

aten = torch.ops.aten
# Element types that executables take and compute with.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_COMPILED = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
# Ops that torch runs where they are still in a graph, each an aten packet's or one of this project's.
_LEFT = (
    CALL_HOOKS,
    *(CTC_LOSS, CTC_LOSS_BACKWARD, LSTM_LAYER, LSTM_LAYER_BACKWARD, *CUDNN_LAYERS),
    *(BIASED_ATTENTION, BIASED_ATTENTION_BACKWARD),
    *(
        getattr(packet, overload)
        for packet in (
            *(aten.sort, aten.topk, aten.kthvalue, aten.median, aten.nanmedian, aten.mode),
            *(aten._embedding_bag, aten._embedding_bag_forward_only, aten._embedding_bag_backward),
            *(aten._embedding_bag_dense_backward, aten._embedding_bag_per_sample_weights_backward),
            *(aten.adaptive_max_pool2d, aten.adaptive_max_pool2d_backward),
            *(aten.adaptive_max_pool3d, aten.adaptive_max_pool3d_backward),
            *(aten.scatter_reduce, aten.index_reduce),
        )
        for overload in packet.overloads()
    ),
)
# Backwards of CPU libraries' layers, for which the forward, run in eager, left notes in the library's own form.
_OF_LIBRARIES = (aten.mkldnn_rnn_layer_backward.default,)
# Of float64 IREE's code for a CPU calls these by name, and is linked with no library that has them.
_NAMED_IN_F64 = (
    aten.sin.default,
    aten.cos.default,
    aten.asin.default,
    aten.acos.default,
    aten.atan.default,
    aten.atan2.default,
)
# What lies between its layers and takes torch a few microseconds, where a compiled function takes fifty: parts of
# tensors, and sums of the gradients that two directions give, up to this many bytes, which an island has until its
# end.
_PARTS = (aten.slice.Tensor, aten.permute.default)
_SUMS = (aten.add.Tensor,)
_MOST_BETWEEN = 1 << 18
_WHY_WHOLE = {ROUNDING: "whole numbers hang on its rounding", CHOICE: "it chooses among equal values, as eager does"}
_NAME_OF_HOOKS = str(CALL_HOOKS).removesuffix(".default")
_HOOKS = "hooks are called in Python"
REMEDY = "leave fallback='island', or compute this outside of the compiled function"
"""What to do about an op that is not compiled where none may run in torch."""


@dataclass(frozen=True)
class Island:
    """Nodes of a graph, by name in its order; the ops among them, where in the user's code, and why they are not
    compiled; ``is_library`` says that they could be, and a library is faster, ``by_values`` that they go by no strides
    and give no views."""

    nodes: tuple[str, ...]
    ops: tuple[str, ...]
    place: str
    reason: str
    is_library: bool = False
    by_values: bool = False

    @property
    def uncompiled(self) -> tuple[str, ...]:
        """The ops that could be compiled better than they are: no library's, and no calls of hooks."""
        return () if self.is_library else tuple(op for op in self.ops if op != _NAME_OF_HOOKS)

    def __str__(self) -> str:
        return f"{', '.join(self.ops)}{f' ({self.place})' if self.place else ''}: {self.reason}"


def find_uncompiled(graph_module: GraphModule, kinds: Collection[str] = ()) -> dict[str, str]:
    """The nodes that no compiler need be asked about, by name, each with the reason: their values have element types
    that executables have not (complex numbers, or on devices of ``kinds`` some functions of float64), they are random
    and no function of the seed, they raise errors, or they read what a library left for them."""
    reasons: dict[str, str] = {}
    for node in graph_module.graph.nodes:
        if not can_be_island(node):
            continue
        if LIBRARY in node.meta:
            mark = node.meta[LIBRARY]
            reasons[node.name] = _WHY_WHOLE.get(mark, f"{mark} is faster")
            continue
        if node.target is CHECK:
            # With what it looks at, so that it is in an island that is needed.
            checked = [n.args[0] if n.target is operator.getitem else n for n in node.all_input_nodes]
            reasons |= {n.name: "it may raise an error" for n in (node, *checked)}
        values = [] if is_border(node) else _values(node)
        dtype = next((t.dtype for t in values if t.dtype not in _COMPILED), None)
        if dtype is not None:
            name = str(dtype).removeprefix("torch.")
            reasons[node.name] = f"it computes with {name}, which executables do not have"
        elif "cpu" in kinds and node.target in _NAMED_IN_F64 and node.meta["val"].dtype is torch.float64:
            reasons[node.name] = "IREE's code for a CPU has no such function of float64"
        elif node.target is CALL_HOOKS:
            reasons[node.name] = _HOOKS
        elif is_random(node):
            reasons[node.name] = "it draws random numbers in torch's own way"
        elif node.target in _OF_LIBRARIES:
            reasons[node.name] = "it reads what oneDNN's forward left for it"
        elif node.target in _LEFT:
            reasons[node.name] = "PyTorch has a kernel for it"
    return reasons


def can_be_island(node: Node) -> bool:
    """Whether a node computes: an op of torch's, or an element of what one gives; numbers of sizes do not."""
    return node.op == "call_function" and not _is_ours(node) and not isinstance(node.meta.get("val"), SYMBOLIC)


def draws_numbers(graph_module: GraphModule) -> bool:
    """Whether ops of a graph draw random numbers in torch's own way."""
    return any(can_be_island(n) and is_random(n) for n in graph_module.graph.nodes)


def refuse_uncompiled(graph_module: GraphModule, kinds: Collection[str] = ()) -> dict[str, str]:
    """Raise :class:`CaptureError` at the first of the nodes that `find_uncompiled` finds and no library computes; those
    that one does, with reasons."""
    reasons = find_uncompiled(graph_module, kinds)
    named = name_uncompiled(graph_module, reasons)
    if named is not None:
        raise CaptureError(named, REMEDY)
    return reasons


def name_uncompiled(graph_module: GraphModule, reasons: Mapping[str, str]) -> str | None:
    """Name the first of the nodes in ``reasons`` that no library computes, and that are no hooks, with the user's line
    and its reason."""
    for node in graph_module.graph.nodes:
        if node.name in reasons and reasons[node.name] != _HOOKS and LIBRARY not in node.meta:
            op = node.args[0] if node.target is operator.getitem else node
            return f"{op.target}{_at(op)} is not compiled: {reasons[node.name]}"
    return None


def plan_islands(graph_module: GraphModule, reasons: Mapping[str, str]) -> tuple[Island, ...]:
    """Islands that hold the nodes named in ``reasons``: neighbours are one island where no other op lies between them.

    What depends on a tangent is in no island with what does not: that would leave it to neither half.

    Raises:
        CaptureError: a node cannot be an island, because it looks at memory outside of its arguments.
    """
    nodes = [*graph_module.graph.nodes]
    asked = {n.args[0] if n.target is operator.getitem else n for n in nodes if n.name in reasons}
    for node in asked:
        _refuse_reach(node)
    between = _find_between(nodes, asked)
    members = {n for n in nodes if n in asked or n in between or (n.target is operator.getitem and n.args[0] in asked)}
    groups = _merge(nodes, members)
    return tuple(_describe(group, reasons, between) for group in groups)


def _find_between(nodes: Sequence[Node], asked: Collection[Node]) -> set[Node]:
    """The small ops that lie between islands of a library's layers."""
    layers = {node for node in asked if node.target in _OF_LIBRARIES}
    between: set[Node] = set()
    # From the last on: an op belongs there if all that takes what it gives does.
    for node in reversed(nodes):
        if node.target not in (*_PARTS, *_SUMS) or not node.users or not all(u in layers | between for u in node.users):
            continue
        value = node.meta["val"]
        is_small = not isinstance(value.numel(), SYMBOLIC) and value.nbytes <= _MOST_BETWEEN
        if node.target in _PARTS or (is_small and all(_maker(n) in layers for n in node.all_input_nodes)):
            between.add(node)
    return between


def _maker(node: Node) -> Node | None:
    """The op that a node is a result of."""
    source = node.args[0] if node.target is operator.getitem else node
    return source if isinstance(source, Node) else None


def _is_ours(node: Node) -> bool:
    """Whether a node stands for what this project does itself."""
    return getattr(node.target, "namespace", "") == "retrograd" and node.target not in _LEFT


def is_random(node: Node) -> bool:
    """Whether an op draws random numbers in torch's own way."""
    # A library's attention has the tag for its dropout, with which it is none of these.
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and node.target not in LIBRARY_OPS


def _values(node: Node) -> list[torch.Tensor]:
    """List the tensors that a node takes and returns."""
    found = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]


def _refuse_reach(node: Node) -> None:
    """Refuse an op that reads its argument's memory by strides, where that is part of a larger tensor: between islands
    and compiled code each tensor has memory of its own."""
    if "as_strided" not in str(node.target):
        return
    for value in (n.meta["val"] for n in node.all_input_nodes):
        if value.untyped_storage().nbytes() > value.numel() * value.element_size():
            raise CaptureError(
                f"{node.target}{_at(node)} is not compiled, and reads memory outside of its argument",
                "take the view of the whole tensor, or leave this op to eager",
            )


def _at(node: Node) -> str:
    place = source_place(node.stack_trace)
    return f" at {place}" if place else ""


def _describe(group: Sequence[Node], reasons: Mapping[str, str], between: Collection[Node]) -> Island:
    ops = [n for n in group if n.target is not operator.getitem and n not in between]
    # The views of an op go with it, and say nothing.
    ops = [n for n in ops if WITH not in n.meta] or ops
    named = next(n for n in [*ops, *group] if n.name in reasons)
    place = next((p for n in ops if (p := source_place(n.stack_trace))), "")
    names = dict.fromkeys(str(n.target).removesuffix(".default") for n in ops)
    is_library = all(LIBRARY in n.meta for n in ops)
    return Island(
        tuple(n.name for n in group),
        tuple(names),
        place.rpartition("/")[2],
        reasons[named.name],
        is_library,
        # What lies between such ops is a part of what one takes, and no result.
        by_values=is_library or all(n.target in _OF_LIBRARIES for n in ops),
    )


# -- Which nodes go together ----------------------------------------------------------------------------------------


def _merge(nodes: Sequence[Node], members: Collection[Node]) -> list[list[Node]]:
    """The members in groups, such that the graph has no cycle when each group is one node."""
    place = {n: i for i, n in enumerate(nodes)}
    late = _find_late(nodes)
    group_of: dict[Node, list[Node]] = {}
    for node in sorted(members, key=place.__getitem__):
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, Node) and source in group_of:
            group_of[source].append(node)
            group_of[node] = group_of[source]
            continue
        group_of[node] = [node]
        for neighbour in node.all_input_nodes:
            first, second = group_of.get(neighbour), group_of[node]
            if first is None or first is second or (neighbour in late) != (node in late):
                continue
            if not _leads_around(first, second, group_of):
                first.extend(second)
                group_of.update(dict.fromkeys(second, first))
    unique = {id(group): group for group in group_of.values()}.values()
    return [sorted(group, key=place.__getitem__) for group in unique]


def _find_late(nodes: Sequence[Node]) -> set[Node]:
    """The nodes that depend on a tangent."""
    late: set[Node] = set()
    for node in nodes:
        if isinstance(node.meta.get("desc"), TangentAOTInput) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    # What only an op of the backward looks at is seen there.
    names = {node.name for node in late}
    late.update(node for node in nodes if node.meta.get(WITH) in names)
    return late


def _leads_around(first: Sequence[Node], second: Sequence[Node], group_of: Mapping[Node, Sequence[Node]]) -> bool:
    """Whether a path leads from ``first`` to ``second`` through something else, which would then have to come both
    before and after both."""
    ends = {*first, *second}
    pending = [user for node in ends for user in node.users if user not in ends]
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in ends:
            return True
        if node not in seen:
            whole = group_of.get(node, (node,))
            seen.update(whole)
            pending.extend(user for n in whole for user in n.users)
    return False
