# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The same graph without calls of libraries, for what has to run without PyTorch: a saved file."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.decompositions import decomposition_table
from retrograd.frontend.libraries.ops import FLOPS, LIBRARY, LIBRARY_OPS


def uses_libraries(graph_module: GraphModule) -> bool:
    """Whether libraries compute ops of a graph."""
    return any(LIBRARY in node.meta for node in graph_module.graph.nodes)


def write_out(graph_module: GraphModule) -> GraphModule:
    """A copy of a graph in which what libraries compute is written in ops that are compiled; other nodes keep their
    names."""
    graph = Graph()
    copies: dict[Node, Any] = {}
    for node in graph_module.graph.nodes:
        if LIBRARY in node.meta and node.target in LIBRARY_OPS:
            copies[node] = _write(graph, node, copies)
            continue
        source = copies.get(node.args[0]) if node.target is operator.getitem else None
        if isinstance(source, tuple):
            copies[node] = source[node.args[1]]
            continue
        copies[node] = graph.node_copy(node, lambda n: copies[n])
        copies[node].meta = {k: v for k, v in node.meta.items() if k != LIBRARY}
    return GraphModule(graph_module, graph)


def _write(graph: Graph, op: Node, copies: dict[Node, Any]) -> Any:
    """What an op gives, by ops that are compiled: a node, or a tuple of nodes."""
    table = decomposition_table()
    nodes = list(op.all_input_nodes)
    values = [node.meta["val"] for node in nodes]

    def run(*tensors: Tensor) -> Any:
        given = dict(zip(nodes, tensors, strict=True))
        args, kwargs = torch.fx.node.map_arg((op.args, op.kwargs), given.__getitem__)
        return op.target(*args, **kwargs)  # type: ignore[operator]

    with _mode_of(values):
        traced = make_fx(run, table, tracing_mode="real")(*values)
    inner: dict[Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), map(copies.get, nodes), strict=True))
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            results = node.args[0]
            break
        if node.op == "get_attr":
            setattr(op.graph.owning_module, f"{op.name}_{node.target}", getattr(traced, str(node.target)))
        inner[node] = graph.node_copy(node, lambda n: inner[n])
        if node.op == "get_attr":
            inner[node].target = f"{op.name}_{node.target}"
        inner[node].meta = {**_meant(op), "val": node.meta.get("val")}
    return (
        torch.fx.node.map_arg(results, inner.__getitem__)
        if isinstance(results, Node)
        else tuple(None if r is None else inner[r] for r in results)
    )


def _meant(op: Node) -> dict[str, Any]:
    return {k: v for k, v in op.meta.items() if k not in (LIBRARY, FLOPS, "val", "tensor_meta")}


def _mode_of(values: list[Any]) -> Any:
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))
