# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Indices that name whole rows: one for each row, expanded over the other axes, as a sum over a graph's edges has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.decompositions.views.axes import as_row

aten = torch.ops.aten

_SAME = frozenset((aten.alias.default, aten.detach.default))
_AS_ROW = as_row(aten.gather.default)


def find_rows(x: Tensor, along: int, index: Tensor) -> Tensor | None:
    """The rows of ``x`` along an axis that an index of ``scatter`` or ``gather`` names, ``[rows]``; ``None`` where it
    names single elements, or that is not known of each call."""
    others = [axis for axis in range(x.dim()) if axis != along]
    if not others or not all(_is_equal(index, x, axis) for axis in others):
        return None
    repeated = find_repeated(index)
    if not all(axis in repeated for axis in others):
        return None
    for axis in others:
        index = aten.slice.Tensor(index, axis, 0, 1)
    return index.flatten()


def _is_equal(index: Tensor, x: Tensor, axis: int) -> bool:
    # To compare open sizes would add a guard.
    sizes = index.shape[axis], x.shape[axis]
    return all(isinstance(size, int) for size in sizes) and sizes[0] == sizes[1]


def find_repeated(index: Tensor) -> set[int]:
    """The axes along which a tensor repeats one element since it was expanded there. While a graph is traced, one that
    the graph itself expands: how an argument lies may be another way at the next call."""
    mode = get_proxy_mode()
    if mode is None:
        return {axis for axis, stride in enumerate(index.stride()) if stride == 0}
    node: Any = get_proxy_slot(index, mode.tracer, None, lambda slot: slot.proxy.node)
    while isinstance(node, Node) and node.target in _SAME:
        node = node.args[0]
    if not isinstance(node, Node) or node.target is not aten.expand.default:
        return set()
    given = node.args[0]
    before = given.meta.get("val") if isinstance(given, Node) else None
    if not isinstance(before, Tensor):
        return set()
    added = index.dim() - before.dim()
    ones = (axis for axis, size in enumerate(before.shape) if isinstance(size, int) and size == 1)
    return {*range(added), *(added + axis for axis in ones)}


def gather(x: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Any:
    """``aten.gather`` of whole rows as ``aten.index_select``; of a scalar as of a row of one element."""
    if x.dim() and index.numel() and (rows := find_rows(x, dim % x.dim(), index)) is not None:
        return aten.index_select.default(x, dim, rows)
    return _AS_ROW(x, dim, index, **kwargs)


ENTRIES = (
    Decomposition(
        aten.gather.default, gather, "torch-mlir reads an index of whole rows element by element, and refuses scalars"
    ),
)
