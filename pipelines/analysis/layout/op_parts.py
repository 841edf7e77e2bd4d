# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Into how many parts what an op writes first is split, as its operands say."""

from __future__ import annotations

from collections.abc import Sequence

from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.split_products import find_parts
from retrograd.pipelines.analysis.layout.split_reductions import REDUCTIONS, find_reduction_parts
from retrograd.pipelines.analysis.layout.tensor_types import tensor_shape
from retrograd.pipelines.analysis.partition.op_kinds import INDEX_OPERANDS

_LIST = "torch.prim.ListConstruct"
_INTEGER, _NONE = "torch.constant.int", "torch.constant.none"


def count_parts(op: ir.Operation, name: str, operands: Sequence[tuple[int, ...] | None]) -> int:
    """Into how many parts what the op ``name`` on operands of these shapes writes first is split: partial sums of a
    product or a reduction, coordinates of a scatter along each axis; 1 for any other."""
    if name in INDEX_OPERANDS:
        return count_index_axes(op.operands[INDEX_OPERANDS[name]])
    if name in REDUCTIONS:
        return find_reduction_parts(operands[0] or (), read_axes(op))
    return find_parts(name, operands)


def count_index_axes(index: ir.Value) -> int:
    """Along how many axes an index says places: those of a tensor, or as many as there are tensors in a list."""
    shape, listed = tensor_shape(index.type), _producer(index)
    if shape is not None:
        return len(shape)
    return 1 if listed is None else sum(tensor_shape(v.type) is not None for v in listed.operands)


def read_axes(op: ir.Operation) -> frozenset[int]:
    """The axes that a reduction reduces, which are its second operand; all of them where it has none, and none where
    they are no literals. A tensor of no axis has axis 0 to PyTorch, and none here."""
    rank = len(tensor_shape(op.operands[0].type) or ())
    if not rank:
        return frozenset()
    axes = _producer(op.operands[1]) if len(op.operands) > 1 else None
    if len(op.operands) == 1 or (axes is not None and axes.name == _NONE):
        return frozenset(range(rank))
    if axes is None or axes.name != _LIST:
        return frozenset()
    literals = [p for p in map(_producer, axes.operands) if p is not None and p.name == _INTEGER]
    if len(literals) < len(axes.operands):
        return frozenset()
    return frozenset(int(ir.IntegerAttr(p.attributes["value"]).value) % rank for p in literals)


def _producer(value: ir.Value) -> ir.Operation | None:
    return value.owner if isinstance(value, ir.OpResult) else None
