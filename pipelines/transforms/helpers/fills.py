# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensors whose elements are all one number, in linalg on tensors."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.transforms.helpers.barriers import BARRIER, add_barrier

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


def create_fill(
    number: ir.Attribute, into: ir.Value, ip: ir.InsertionPoint, location: ir.Location, *, hidden: bool = False
) -> ir.Value:
    """A ``linalg.fill`` of ``into`` with ``number``, an attribute of the type of its elements. With a number that is
    ``hidden`` IREE does not make a constant of the tensor, which would stay in memory between calls."""
    element = ir.RankedTensorType(into.type).element_type
    constant = ir.Operation.create(CONSTANT, results=[element], attributes={"value": number}, loc=location, ip=ip)
    value = add_barrier(constant.result, ip, location) if hidden else constant.result
    fill = ir.Operation.create(
        FILL,
        operands=[value, into],
        results=[into.type],
        attributes={"operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 1])},
        regions=1,
        loc=location,
        ip=ip,
    )
    body = ir.Block.create_at_start(fill.regions[0], [element, element], [location, location])
    ir.Operation.create("linalg.yield", operands=[body.arguments[0]], loc=location, ip=ir.InsertionPoint(body))
    return fill.result
