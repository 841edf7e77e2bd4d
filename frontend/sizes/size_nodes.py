# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sizes in a traced graph: each open one is read once, at its head, and all else is worked out from there.

The tracer asks tensors for their sizes wherever it needs them; a backward would then have to keep a tensor alive for
its shape. Read off the arguments, sizes are numbers of their own, which both halves take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch

from retrograd.frontend.doors.deferred_code import recompile_when_called
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.sizes.size_expressions import emit

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# On a node: the name of the size that it is.
SIZE = "retrograd_size"


def find_symbolic(inputs: Sequence[Any]) -> list[Any]:
    """Find the symbolic numbers among inputs and among what describes tensors."""
    values: list[Any] = []
    for value in inputs:
        tensor = isinstance(value, torch.Tensor)
        values += [*value.shape, *value.stride(), value.storage_offset()] if tensor else [value]
    return [value for value in values if isinstance(value, SYMBOLIC)]


def has_open_sizes(inputs: Sequence[Any]) -> bool:
    """Whether any of these numbers is open."""
    return any(not value.node.expr.is_number for value in find_symbolic(inputs))


def share_sizes(graph_module: torch.fx.GraphModule, names: Mapping[sympy.Symbol, str]) -> None:
    """Work out every number of the graph from one node for each symbol, in place.

    Raises:
        CaptureError: a size that is none of an argument's, or that no op works out.
    """
    if not names:
        return
    graph = graph_module.graph
    heads = _add_heads(graph, names)
    made: dict[sympy.Basic, Any] = {}
    # Behind the heads, one op after another: sizes depend on sizes alone.
    ops = [node for node in graph.nodes if node.op != "placeholder" and node not in heads.values()]
    for node in [*graph.find_nodes(op="placeholder"), *ops]:
        value = node.meta.get("val")
        if not isinstance(value, SYMBOLIC) or not node.users or node in heads.values():
            continue
        expr = value.node.expr
        if expr not in made:
            with graph.inserting_before(ops[0]), _at(node):
                _check_number(value)
                made[expr] = emit(graph, expr, heads)
        node.replace_all_uses_with(made[expr])
    _turn_differences(graph)
    # A head that no op takes stays: shapes are written in terms of it.
    graph.eliminate_dead_code(lambda node: node.is_impure() or SIZE in node.meta)
    recompile_when_called(graph_module)


def _turn_differences(graph: torch.fx.Graph) -> None:
    """Write a size less a tensor, as reflection pads have it, as the op that takes the tensor first: torch-mlir's
    importer takes none but a tensor, or a number known by now, in that place."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sub.Tensor):
        size, tensor, *_ = node.args
        if isinstance(size, torch.fx.Node) and isinstance(size.meta.get("val"), SYMBOLIC) and not node.kwargs:
            node.target, node.args = torch.ops.aten.rsub.Scalar, (tensor, size)


def find_heads(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes that open sizes are read at, in order."""
    return [node for node in graph.nodes if SIZE in node.meta]


def find_names(graph: torch.fx.Graph) -> dict[sympy.Symbol, str]:
    """The names of a graph's open sizes by their symbols."""
    return {node.meta["val"].node.expr: node.meta[SIZE] for node in find_heads(graph)}


def restore_heads(graph: torch.fx.Graph, sizes: Mapping[str, torch.SymInt]) -> None:
    """Read ``sizes`` off the arguments of a graph again, at nodes of these names, where such a node is gone because no
    op takes it."""
    there = {node.name for node in graph.nodes}
    placeholders = graph.find_nodes(op="placeholder")
    for name, size in sizes.items():
        place = find_axis(placeholders, size.node.expr)
        if name in there or place is None:
            continue
        with graph.inserting_after(placeholders[-1]):
            head = graph.call_function(torch.ops.aten.sym_size.int, (placeholders[place[0]], place[1]))
        # A graph keeps the names of nodes that are gone to itself.
        head.name = name
        head.meta = {"val": size, SIZE: str(size)}


def _add_heads(graph: torch.fx.Graph, names: Mapping[sympy.Symbol, str]) -> dict[sympy.Symbol, torch.fx.Node]:
    placeholders = graph.find_nodes(op="placeholder")
    heads: dict[sympy.Symbol, torch.fx.Node] = {}
    last = placeholders[-1]
    for symbol, name in names.items():
        given = next((n for n in placeholders if _is_symbol(n.meta.get("val"), symbol)), None)
        if given is not None:
            given.meta[SIZE] = name
            heads[symbol] = given
            continue
        place = find_axis(placeholders, symbol)
        if place is None:
            raise CaptureError(
                f"the dynamic size '{name}' is the size of no argument", "leave it out of dynamic_shapes"
            )
        tensor, axis = placeholders[place[0]], place[1]
        with graph.inserting_after(last):
            last = heads[symbol] = graph.call_function(torch.ops.aten.sym_size.int, (tensor, axis))
        last.meta = {"val": tensor.meta["val"].shape[axis], SIZE: name}
    return heads


def find_axis(placeholders: Sequence[torch.fx.Node], symbol: sympy.Expr) -> tuple[int, int] | None:
    """Where a size can be read off an argument: its number and the axis. Tangents, which a forward has not, are last
    among them."""
    for number, node in enumerate(placeholders):
        value = node.meta.get("val")
        for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if _is_symbol(size, symbol):
                return number, axis
    return None


def _is_symbol(value: Any, symbol: sympy.Expr) -> bool:
    return isinstance(value, torch.SymInt) and value.node.expr == symbol


def _check_number(value: Any) -> None:
    if isinstance(value, torch.SymBool):
        raise CaptureError(
            f"a tensor is computed from whether {value}", "compute it outside of the model, or fix the size"
        )


@contextmanager
def _at(node: torch.fx.Node) -> Iterator[None]:
    """Errors of the block say where in the user's code the node is from."""
    try:
        yield
    except CaptureError as error:
        # Sizes have no line of their own: that of an op that takes them is told.
        traces = [n.stack_trace for n in (node, *node.users) if n.stack_trace]
        where = traces[0].strip().splitlines()[0].strip() if traces else "an unknown place"
        raise CaptureError(f"{error.message}, at {where}", error.remedy) from error
