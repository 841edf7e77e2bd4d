# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Integers and conditions that a model computes from floats which depend on no argument, as the buckets of relative
positions are a logarithm, cut to a whole number.

The float next to a whole number decides, and compiled code rounds it in its own way: a bucket off by one is another
row of a table. So PyTorch computes these constants once, as eager does each time. What is computed in such a way from
whole numbers that are an argument, or as many as a size that is open, runs in PyTorch at each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from retrograd.frontend.doors.deferred_code import recompile_when_called
from retrograd.frontend.doors.outputs import hint
from retrograd.frontend.libraries.ops import LIBRARY, ROUNDING, uses_any_library
from retrograd.frontend.preparation.empty_tensors import erase_unused, is_empty, is_pure, is_random, is_unwritten

aten = torch.ops.aten

MOST_ELEMENTS = 1 << 20
"""A constant of more elements stays computed: it would be a part of the program, and of the file."""
# What jumps, and stays a float.
_STEPS = {
    aten.floor.default,
    aten.ceil.default,
    aten.trunc.default,
    aten.round.default,
    aten.round.decimals,
    aten.sign.default,
    aten.fmod.Scalar,
    aten.fmod.Tensor,
    aten.remainder.Scalar,
    aten.remainder.Tensor,
    aten.div.Tensor_mode,
    aten.div.Scalar_mode,
}
_NARROW = (torch.int8, torch.int16, torch.int32)


def fold_rounded_constants(graph_module: GraphModule) -> None:
    """Put constants, computed by PyTorch, in place of what rounds or compares constant floats, in place."""
    graph, values = graph_module.graph, dict[Node, Any]()
    fixed = set[Node]()
    for node in graph.nodes:
        if _is_fixed(node, fixed):
            fixed.add(node)
    # From the last one on: what only that is computed from is gone, decisions among it.
    for node in reversed([node for node in graph.nodes if node in fixed and decides(node)]):
        if not node.users:
            continue
        with _disable_current_modes():
            value = _compute(node, values)
            kept = None if value is None else _narrowed(value)
        if kept is None:
            continue
        name = f"_retrograd_rounded_{sum(1 for _ in graph_module.buffers())}"
        graph_module.register_buffer(name, kept, persistent=False)
        with graph.inserting_before(node):
            constant = graph.get_attr(name)
        unused = [n for n in node.all_input_nodes if len(n.users) == 1]
        constant.meta["val"] = node.meta["val"].new_empty(kept.shape, dtype=kept.dtype)
        node.target, node.args = aten._to_copy.default, (constant,)
        node.kwargs = {"dtype": node.meta["val"].dtype}
        erase_unused(graph_module, unused)
    if values:
        recompile_when_called(graph_module)


def _is_fixed(node: Node, fixed: set[Node]) -> bool:
    """Whether a node gives the same tensor at every call: it is a pure op of others that do, of fixed sizes."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.is_complex() or not _has_fixed_sizes(value):
        return False
    if not isinstance(node.target, OpOverload) or not is_pure(node) or node.target._schema.is_mutable:
        return False
    if is_random(node) or is_unwritten(node):
        return False
    return all(n in fixed for n in node.all_input_nodes)


def _has_fixed_sizes(value: Tensor) -> bool:
    return all(isinstance(size, int) for size in value.shape) and value.numel() <= MOST_ELEMENTS and value.dim() > 0


def decides(node: Node) -> bool:
    """Whether a node makes whole numbers or conditions of floats."""
    if is_empty(node) or not any(n.meta["val"].is_floating_point() for n in node.all_input_nodes):
        return False
    return node.target in _STEPS or not node.meta["val"].is_floating_point()


def _compute(node: Node, values: dict[Node, Any]) -> Tensor | None:
    """Computes a fixed node; ``None`` where PyTorch does not compute it."""
    with torch.no_grad(), torch._C._DisableAutocast():
        try:
            for each in _needed(node, values):
                args, kwargs = torch.fx.node.map_arg((each.args, each.kwargs), values.__getitem__)
                values[each] = each.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, NotImplementedError):
            return None
    value = values[node]
    expected = node.meta["val"]
    return value if value.shape == expected.shape and value.dtype == expected.dtype else None


def _needed(node: Node, values: dict[Node, Any]) -> Iterator[Node]:
    """The nodes that lead to one, in order, itself last, less those that have values."""
    found, waiting = set[Node](), [node]
    while waiting:
        each = waiting.pop()
        if each not in found and each not in values:
            found.add(each)
            waiting += each.all_input_nodes
    yield from sorted(found)


def _narrowed(value: Tensor) -> Tensor:
    """The value in the smallest type of integers that holds it: a program keeps it as a literal."""
    if value.is_floating_point() or value.dtype is torch.bool or value.dtype.itemsize == 1:
        return value.detach()
    least, most = (int(bound) for bound in value.aminmax())
    for dtype in _NARROW:
        if torch.iinfo(dtype).min <= least and most <= torch.iinfo(dtype).max and dtype.itemsize < value.dtype.itemsize:
            return value.to(dtype)
    return value


_CURVED = frozenset(
    overload
    for name in (
        *("log", "log2", "log10", "log1p", "exp", "exp2", "expm1", "pow", "sin", "cos", "tan", "tanh", "sigmoid"),
        *("asin", "acos", "atan", "atan2", "sinh", "cosh", "erf", "rsqrt"),
    )
    for packet in [getattr(aten, name)]
    for overload in (getattr(packet, overload) for overload in packet.overloads())
)


def mark_rounded_places(graph_module: GraphModule) -> None:
    """Leave to PyTorch what computes whole numbers, or conditions, from floats that are functions of whole numbers
    alone and curved, if libraries may compute anything here."""
    if not uses_any_library():
        return
    curved = dict[Node, bool]()
    for node in graph_module.graph.nodes:
        is_curved = node.target in _CURVED or any(curved.get(n, False) for n in node.all_input_nodes)
        is_decided = is_curved and _is_tensor(node) and decides(node)
        if is_decided:
            _mark(node, curved)
        if _is_function_of_integers(node, curved):
            curved[node] = is_curved and not is_decided


def _is_function_of_integers(node: Node, floats: dict[Node, bool]) -> bool:
    """Whether a node gives floats, few enough, that are computed from whole numbers, or from ``floats`` that are."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point() or not is_pure(node) or is_random(node):
        return False
    tensors = [n for n in node.all_input_nodes if _is_tensor(n)]
    return hint(value.numel()) <= MOST_ELEMENTS and all(n in floats or not _is_float(n) for n in tensors)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_float(node: Node) -> bool:
    return bool(node.meta["val"].is_floating_point() or node.meta["val"].is_complex())


def _mark(node: Node, floats: dict[Node, bool]) -> None:
    """Mark what decides, and the floats that it decides by; those that no tensor leads to are exact."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if LIBRARY not in each.meta and any(_is_tensor(n) for n in each.all_input_nodes):
            each.meta = {**each.meta, LIBRARY: ROUNDING}
            waiting += [n for n in each.all_input_nodes if n in floats]
