# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The same graph without calls of libraries, for what has to run without PyTorch: a saved file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from retrograd.frontend.decompositions.table import tracing_table
from retrograd.frontend.doors.deferred_code import make_graph_module
from retrograd.frontend.libraries.kernel_convolutions import find_kernel_convolutions, lay_out_convolutions
from retrograd.frontend.libraries.ops import FLOPS, LIBRARY, LIBRARY_OPS, NO_LIBRARIES, POOLS, Libraries, library_ops
from retrograd.frontend.libraries.permutations import join_permutations
from retrograd.frontend.preparation.graph_writer import GraphWriter
from retrograd.frontend.sizes.size_nodes import SIZE


def uses_libraries(graph_module: GraphModule) -> bool:
    """Whether libraries compute ops of a graph."""
    return any(LIBRARY in node.meta for node in graph_module.graph.nodes)


def write_out(graph_module: GraphModule, libraries: Libraries) -> GraphModule:
    """A copy of a graph in which what libraries compute is written in ops that are compiled; other nodes keep their
    names. ``libraries`` are those that it was traced for: what kernels of our own take stays whole."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in graph_module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    written = make_graph_module(graph_module, graph)
    marked = [node for node in graph.nodes if node.meta.pop(LIBRARY, None) is not None]
    with torch.no_grad(), library_ops(libraries.compiled()):
        writer = GraphWriter(written, _mode_of(marked), tracing_table())
        for op in marked:
            if op.target in LIBRARY_OPS:
                del op.meta[FLOPS]
                write_op(writer, op)
        lay_out_convolutions(graph, find_kernel_convolutions(graph))
        join_permutations(graph)
        graph.eliminate_dead_code(lambda node: node.is_impure() or SIZE in node.meta)
    graph.lint()
    return written


def write_out_pools(graph_module: GraphModule) -> None:
    """Decompose the pools that were kept whole and have their images plane by plane, in place."""
    pools = [node for op in POOLS for node in graph_module.graph.find_nodes(op="call_function", target=op)]
    if pools:
        with torch.no_grad(), library_ops(NO_LIBRARIES):
            writer = GraphWriter(graph_module, _mode_of(pools), tracing_table())
            for op in pools:
                write_op(writer, op)


def write_op(writer: GraphWriter, op: Node) -> None:
    """Put ops that are compiled in the place of one, in front of which they stand."""
    with writer.at(op):
        args, kwargs = map_arg((op.args, op.kwargs), writer.value)
        results = op.target(*args, **kwargs)  # type: ignore[operator]
    if isinstance(results, Tensor):
        op.replace_all_uses_with(writer.node(results))
    for element in list(op.users):
        result = results[element.args[1]]
        if result is not None:
            element.replace_all_uses_with(writer.node(result))
            op.graph.erase_node(element)
    if not op.users:
        op.graph.erase_node(op)


def _mode_of(nodes: Sequence[Node]) -> FakeTensorMode:
    """The mode that a graph was traced in."""
    values = tree_leaves([node.meta.get("val") for node in nodes])
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))
