# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Looks through views in linalg on tensors: ops for which IREE moves nothing."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.transforms.helpers.generics import GENERIC, read_maps

SLICE = "tensor.extract_slice"
# Ops whose result is all of their first operand.
_VIEWS = ("flow.tensor.bitcast", "tensor.cast", "tensor.collapse_shape", "tensor.expand_shape", "tensor.reshape")


def view_root(value: ir.Value) -> ir.Value:
    """The value whose storage ``value`` may look at: all of it, or a slice."""
    while isinstance(value, ir.OpResult) and shares_storage(value.owner):
        value = value.owner.operands[0]
    return value


def shares_storage(op: ir.Operation) -> bool:
    """Whether the result of ``op`` may look at the storage of its first operand: at all of it, or at a slice."""
    return op.name == SLICE or is_view(op)


def is_view(op: ir.Operation) -> bool:
    """Whether the result of ``op`` is all of its first operand, as it lies; for IREE a copy that only moves axes of
    size 1 is such a view."""
    if op.name in _VIEWS:
        return True
    if op.name == "linalg.transpose":
        shape = ir.RankedTensorType(op.operands[0].type).shape
        order = [axis for axis in ir.DenseI64ArrayAttr(op.attributes["permutation"]) if shape[axis] != 1]
        return order == sorted(order)
    if op.name == GENERIC and len(op.operands) == 2 and len(op.results) == 1:
        body = [view.operation for view in op.regions[0].blocks[0].operations]
        return len(body) == 1 and body[0].operands[0] == op.regions[0].blocks[0].arguments[0] and keeps_order(op)
    return False


def keeps_order(op: ir.Operation) -> bool:
    """Whether an op of one argument reads it in the order in which it writes its result, but for axes of size 1."""
    source, result = ([*ir.RankedTensorType(operand.type).shape] for operand in op.operands)
    read, written = (
        [str(index) for index, size in zip(map_.results, shape, strict=True) if size != 1]
        for map_, shape in zip(read_maps(op), (source, result), strict=True)
    )
    return read == written
