# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whole numbers that a model computes from whole numbers by way of a logarithm or another function that each library
rounds in its own way: the buckets of positions that are an argument, or as many as a size that is open.

A bucket off by one is another row of a table, so these few ops run in PyTorch, as eager's do. Those that depend on no
argument are constants (``rounded_constants.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from retrograd.frontend.doors.outputs import hint
from retrograd.frontend.libraries.ops import LIBRARY, ROUNDING, uses_any_library
from retrograd.frontend.preparation.empty_tensors import is_pure, is_random
from retrograd.frontend.preparation.rounded_constants import MOST_ELEMENTS, decides

aten = torch.ops.aten

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
