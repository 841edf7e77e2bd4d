# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Unsigned bytes, which torch-mlir takes for signed ones where an op computes with them: 200 times a float32 was -56
times it, and quotients and maxima ended it. What computes with bytes is given them as int32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from retrograd.frontend.doors.deferred_code import recompile_when_called

aten, prims = torch.ops.aten, torch.ops.prims

# Besides all that are elementwise.
_COMPUTING = (
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.prod.default,
    aten.prod.dim_int,
    aten.amax.default,
    aten.amin.default,
    aten.max.default,
    aten.min.default,
    aten.cumsum.default,
    aten.cumprod.default,
)
# The arguments that choose, and are no numbers.
_CHOOSING = {aten.where.self: 0, aten.masked_fill.Scalar: 1, aten.masked_fill.Tensor: 1}
# They give elements as they are: bytes of bytes alone are no computation.
_JOINING = (aten.cat.default, aten.where.self)
# Conversions know what they convert from.
_KEPT = (aten.clone.default, aten._to_copy.default, aten.copy.default, aten.alias.default, aten.detach.default)


def widen_bytes(graph_module: GraphModule) -> None:
    """Have each op that computes with unsigned bytes take them as int32, and give what it gave."""
    graph, wide = graph_module.graph, dict[Node, Node]()
    for node in list(graph.nodes):
        given = [n for n in node.all_input_nodes if _is_bytes(n)] if _computes(node) else []
        chosen = node.args[_CHOOSING[node.target]] if node.target in _CHOOSING else None
        for value in given:
            if value is not chosen:
                if value not in wide:
                    wide[value] = _widen(graph, value)
                node.replace_input_with(value, wide[value])
        if given:
            _give_as_before(graph, node)
    if wide:
        recompile_when_called(graph_module)


def _computes(node: Node) -> bool:
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "aten" or node.target in _KEPT:
        return False
    if not isinstance(node.meta.get("val"), Tensor):
        return False
    if node.target in _JOINING:
        return not _is_bytes(node)
    return node.target in _COMPUTING or torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]


def _is_bytes(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is torch.uint8


def _widen(graph: Graph, value: Node) -> Node:
    after = value
    while after.next.op == "placeholder":
        after = after.next
    with graph.inserting_after(after):
        node = graph.call_function(prims.convert_element_type.default, (value, torch.int32))
    node.meta = {"val": value.meta["val"].to(torch.int32), "stack_trace": value.stack_trace}
    return node


def _give_as_before(graph: Graph, node: Node) -> None:
    """Convert the result of an op to the type that it has in the graph, where it is another now."""
    dtype = node.meta["val"].dtype
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    value = node.target(*args, **kwargs)  # type: ignore[operator]
    if value.dtype is dtype:
        return
    with graph.inserting_after(node):
        converted = graph.call_function(prims.convert_element_type.default, (node, dtype))
    converted.meta = {**node.meta}
    node.replace_all_uses_with(converted, lambda user: user is not converted)
    node.meta = {**node.meta, "val": value}
    node.meta.pop("tensor_meta", None)
