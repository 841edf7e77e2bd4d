# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Numbers beside tensors, of the kind that the op computes in.

torch-mlir folds ops of constants, and reads a number of another kind than the tensor's by its bits: ``-1`` beside
``ones_like(x)`` was 2^64 - 1, ``full(3.0) <= 0`` was true, and a float beside whole numbers ended the process. Of two
conditions it folds the sum to an exclusive or, and remainders to those of C. What is no constant yet may be one after
its own rewriting, so that all such ops are written otherwise.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from retrograd.frontend.doors.deferred_code import recompile_when_called

aten, prims = torch.ops.aten, torch.ops.prims

_ARITHMETIC = (aten.add, aten.sub, aten.rsub, aten.mul, aten.remainder)
_COMPARISONS = (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)


def match_scalars(graph_module: GraphModule) -> None:
    """Give ops of tensors and numbers both of one kind, in place."""
    changed = False
    for node in list(graph_module.graph.nodes):
        if isinstance(node.target, OpOverload) and isinstance(node.meta.get("val"), Tensor):
            changed |= _match(graph_module.graph, node)
    if changed:
        recompile_when_called(graph_module)


def _match(graph: Graph, node: Node) -> bool:
    packet, result = node.target.overloadpacket, node.meta["val"].dtype  # type: ignore[union-attr]
    if packet in _COMPARISONS:
        kind = _compared_in(node)
        return kind is not None and (_widen(graph, node, kind) | (kind.is_floating_point and _as_floats(node)))
    if packet is aten.add and result is torch.bool:
        # Of a factor of zero the first is left.
        other: Any = node.args[1] if node.kwargs.get("alpha", True) else False
        other = other if isinstance(other, Node) else _full(graph, node, bool(other))
        node.target, node.args, node.kwargs = aten.bitwise_or.Tensor, (node.args[0], other), {}
        return True
    if packet not in _ARITHMETIC or not result.is_floating_point:
        return False
    changed = _as_floats(node)
    if node.target is aten.remainder.Scalar and not isinstance(node.args[1], Node):
        node.target, node.args = aten.remainder.Tensor, (node.args[0], _full(graph, node, node.args[1]))
        changed = True
    return changed


def _compared_in(node: Node) -> torch.dtype | None:
    """The type in which a tensor is compared with a number; ``None`` where it is with none."""
    given, number = node.args[0], cast("Any", node.args[1])
    if not isinstance(given, Node) or type(number) not in (int, float):
        return None
    return torch.result_type(given.meta["val"], number)


def _widen(graph: Graph, node: Node, kind: torch.dtype) -> bool:
    """Convert the tensor of a comparison to the type in which it is compared."""
    given: Any = node.args[0]
    if given.meta["val"].dtype is kind:
        return False
    with graph.inserting_before(node):
        wide = graph.call_function(prims.convert_element_type.default, (given, kind))
    wide.meta = {"val": given.meta["val"].to(kind), "stack_trace": node.stack_trace}
    node.args = (wide, *node.args[1:])
    return True


def _as_floats(node: Node) -> bool:
    """Write whole numbers among the arguments as floats."""
    args = tuple(float(a) if type(a) is int else a for a in node.args)
    kwargs = {name: float(a) if type(a) is int else a for name, a in node.kwargs.items()}
    changed = any(type(a) is int for a in (*node.args, *node.kwargs.values()))
    node.args, node.kwargs = args, kwargs
    return changed


def _full(graph: Graph, node: Node, number: Any) -> Node:
    """A tensor of no axes that holds a number, of the type of the result of ``node``."""
    value = node.meta["val"]
    with graph.inserting_before(node):
        full = graph.call_function(aten.full.default, ([], number), {"dtype": value.dtype, "device": value.device})
    full.meta = {"val": value.new_empty(()), "stack_trace": node.stack_trace}
    return full
