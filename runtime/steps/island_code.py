# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes the ops of an island as Python that takes little time between kernels.

An op that is called as ``torch.ops.aten.permute.default`` takes the host 6 us, as a method 2 us. The islands of a step
of BERT base have 250 such views, two thirds of what its host does between kernels of attention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

_VIEWS = frozenset(("view", "permute", "slice", "unsqueeze", "squeeze", "expand", "select", "transpose", "t", "alias"))
# The same arguments, in the same places.
_METHODS: Mapping[Any, str] = {
    aten.view.default: "view",
    aten.permute.default: "permute",
    aten.unsqueeze.default: "unsqueeze",
    aten.expand.default: "expand",
    aten.transpose.int: "transpose",
}
_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {aten.convolution.default: torch.convolution}


def shorten(graph: Graph, arguments: Sequence[torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]] | None:
    """Writes a function that computes what a graph does, of arguments whose shapes and strides are those of
    ``arguments``, which are looked at and not read. ``None`` where it takes more than its arguments.

    Views of an argument, and views of these, are one view of it.
    """
    if any(node.op not in ("placeholder", "call_function", "output") for node in graph.nodes):
        return None
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(arguments):
        return None
    views = _find_views(graph, dict(zip(placeholders, arguments, strict=True)))
    short = Graph()
    copies: dict[Node, Node] = {node: short.placeholder(node.name) for node in placeholders}

    def copied(node: Node) -> Node:
        if node not in copies:
            base, view, begin = views[node]
            copies[node] = _write_view(short, copies[base], view, begin)
        return copies[node]

    for node in graph.nodes:
        if node.op == "output":
            short.output(torch.fx.node.map_arg(node.args[0], copied))
        elif node.op == "call_function" and node not in views:
            args, kwargs = (torch.fx.node.map_arg(given, copied) for given in (node.args, node.kwargs))
            copies[node] = _write_call(short, node.target, args, kwargs)
    run: Callable[..., Sequence[torch.Tensor]] = GraphModule(torch.nn.Module(), short).forward
    return run


def _find_views(graph: Graph, values: dict[Node, torch.Tensor]) -> dict[Node, tuple[Node, torch.Tensor, int]]:
    """Nodes that are views of a placeholder: which one, the view, and how far behind its beginning it begins."""
    found: dict[Node, tuple[Node, torch.Tensor, int]] = {}
    begins = {node: int(value.storage_offset()) for node, value in values.items()}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if not _is_view(node.target) or node.args[:1] != (*inputs,) or inputs[0] not in values:
            continue
        first = inputs[0]
        with torch.no_grad():
            view = node.target(values[first], *node.args[1:], **node.kwargs)
        if view.dtype != values[first].dtype:
            continue
        base = found[first][0] if first in found else first
        values[node] = view
        found[node] = base, view, int(view.storage_offset()) - begins[base]
    return found


def _is_view(target: Any) -> bool:
    return (
        isinstance(target, OpOverload) and target.namespace == "aten" and target._schema.name.split("::")[1] in _VIEWS
    )


def _write_view(graph: Graph, argument: Node, view: torch.Tensor, begin: int) -> Node:
    offset = graph.call_method("storage_offset", (argument,))
    if begin:
        offset = graph.call_function(operator.add, (offset, begin))
    return graph.call_method("as_strided", (argument, tuple(view.shape), tuple(view.stride()), offset))


def _write_call(graph: Graph, target: Any, args: Any, kwargs: Any) -> Node:
    if target in _METHODS and not kwargs:
        return graph.call_method(_METHODS[target], args)
    return graph.call_function(_FUNCTIONS.get(target, target), args, kwargs)
