# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensors without elements, which few lowerings expect: what gives one need not be computed. And tensors whose elements
are still to be written."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from retrograd.frontend.doors.deferred_code import recompile_when_called
from retrograd.frontend.layers.random_ops import DRAW_SEED, UNIFORM

aten = torch.ops.aten

# Past the ends of rows, and where libraries round sizes up.
_PARTLY_WRITTEN = {
    aten._ctc_loss,
    aten._cudnn_ctc_loss,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._efficient_attention_forward,
}


def fill_empty_tensors(graph_module: GraphModule) -> None:
    """Make each op that gives a tensor without elements a constant of its shape, and leave such tensors out where
    others are joined with them. Nodes keep their names; what only such an op used is gone."""
    unused: list[Node] = []
    for node in graph_module.graph.nodes:
        if not is_pure(node) or is_random(node):
            continue
        before = node.all_input_nodes
        if is_empty(node):
            value = node.meta["val"]
            node.target, node.args = aten.full.default, ([*value.shape], 0)
            node.kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        elif node.target is aten.cat.default:
            node.args = ([t for t in node.args[0] if not is_empty(t)], *node.args[1:])
        unused += [n for n in before if not n.users and n not in unused]
    erase_unused(graph_module, unused)
    recompile_when_called(graph_module)


def forget_layouts(graph_module: GraphModule) -> None:
    """Make new memory of a layout new memory of its shape: compiled code has its own layouts, and as_strided, which
    goes by this one, was worked out in the trace. A write in place to a transposed view has such in its backward."""
    for node in graph_module.graph.find_nodes(op="call_function", target=aten.new_empty_strided.default):
        like, size, _ = node.args
        node.target, node.args = aten.new_empty.default, (like, size)
    recompile_when_called(graph_module)


def erase_unused(graph_module: GraphModule, unused: list[Node]) -> None:
    """Erase nodes that nothing uses, then those that only these used. What hooks and checks do is no node's result; a
    seed that nothing is drawn by is no argument of the program."""
    while unused:
        node = unused.pop()
        is_drawn = node.target in (DRAW_SEED, UNIFORM)
        if node.users or not (is_drawn or (is_pure(node) and not node.is_impure())):
            continue
        before = node.all_input_nodes
        graph_module.graph.erase_node(node)
        unused += [n for n in before if not n.users and n not in unused]


def is_pure(node: Node) -> bool:
    """Whether a node does nothing but give its result: tokens of hooks have no elements either, and stand for calls."""
    if node.target is operator.getitem:
        return is_pure(node.all_input_nodes[0])
    return node.op == "call_function" and getattr(node.target, "namespace", "") in ("aten", "prims")


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_unwritten(node: Node) -> bool:
    """Whether a node gives memory as it is allocated."""
    return gives_unwritten(node.target)


def gives_unwritten(op: Any) -> bool:
    """Whether an op gives memory as it is allocated."""
    return isinstance(op, OpOverload) and "empty" in op.__name__


def leaves_unwritten(op: Any) -> bool:
    """Whether an op may give memory of which its kernel has not written all.

    Of the ops in PyTorch's database of operator cases ``_ctc_loss`` alone does on a CPU; others of the list do on GPUs.
    Of ops that are not PyTorch's nobody knows.
    """
    if not isinstance(op, OpOverload):
        return False
    return op.overloadpacket in _PARTLY_WRITTEN or op.namespace not in ("aten", "prims", "retrograd")


def is_empty(node: Node) -> bool:
    """Whether a node gives a tensor with a size that is 0 for every call."""
    value = node.meta.get("val")
    # Of unsigned bytes torch-mlir makes a constant of signed ones, which is then refused.
    if not isinstance(value, torch.Tensor) or value.dtype is torch.uint8:
        return False
    return any(isinstance(size, int) and size == 0 for size in value.shape)
