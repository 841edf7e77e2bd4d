# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensors whose elements are all one number, in linalg on tensors."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.transforms.helpers.barriers import BARRIER, add_barrier
from retrograd.pipelines.transforms.helpers.maker import Maker

FILL, CONSTANT = "linalg.fill", "arith.constant"


def read_number(value: ir.Value) -> ir.Attribute | None:
    """The number that all elements of a constant or a fill are; ``None`` if they differ, or it is none."""
    if not isinstance(value, ir.OpResult):
        return None
    op = value.owner
    if op.name in (FILL, BARRIER):
        return read_number(op.operands[0])
    if op.name != CONSTANT:
        return None
    attribute = op.attributes["value"]
    if not isinstance(attribute, ir.DenseElementsAttr):
        return attribute
    return attribute.get_splat_value() if attribute.is_splat else None


def is_zero(value: ir.Value) -> bool:
    """Whether all elements of a constant or a fill are zero."""
    number = read_number(value)
    return isinstance(number, (ir.FloatAttr, ir.IntegerAttr)) and number.value == 0


def create_fill(number: ir.Attribute, into: ir.Value, make: Maker, *, hidden: bool = False) -> ir.Value:
    """A ``linalg.fill`` of ``into`` with ``number``, an attribute of the type of its elements. With a number that is
    ``hidden`` IREE does not make a constant of the tensor, which would stay in memory between calls."""
    element = ir.RankedTensorType(into.type).element_type
    if hidden:
        # Where the function begins: what a barrier in its midst gives is read there, and its kernels are two regions.
        first = Maker(ir.InsertionPoint.at_block_begin(into.owner.operation.block), make.location)
        value = add_barrier(first.value(CONSTANT, [], element, {"value": number}), first)
    else:
        value = make.value(CONSTANT, [], element, {"value": number})
    segments = {"operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 1])}
    fill = make.op(FILL, [value, into], [into.type], segments, regions=1)
    body = ir.Block.create_at_start(fill.regions[0], [element, element], [fill.location] * 2)
    Maker(ir.InsertionPoint(body), fill.location).op("linalg.yield", [body.arguments[0]])
    return fill.result


SCATTER = "tm_tensor.scatter"
UPDATES, PLACES, TENSOR = 0, 1, 2
# Whether no two updates are of one place.
UNIQUE = "unique_indices"
