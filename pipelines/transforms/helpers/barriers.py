# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Barriers that IREE does not look across, in linalg on tensors."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.dialects import ir

BARRIER = "util.optimization_barrier"
# Of IREE, which takes it away again once kernels are formed.
_FUSION_BARRIER = "iree_tensor_ext.compute_barrier.start"
_TIE = "flow.tensor.tie_shape"
_RETURN, _SIZE = "func.return", "tensor.dim"


def add_barrier(value: ir.Value, ip: ir.InsertionPoint, location: ir.Location) -> ir.Value:
    """``value`` behind a barrier."""
    # An op of IREE's, unknown here: modules that hold it are read with unregistered dialects allowed.
    op = ir.Operation.create(BARRIER, operands=[value], results=[value.type], loc=location, ip=ip)
    return op.results[0]


def hide_from_fusion(value: ir.Value, op: ir.Operation) -> ir.Value:
    """``value`` for ``op``, without IREE's looking at what it is until kernels are formed."""
    hidden = ir.Operation.create(
        _FUSION_BARRIER, operands=[value], results=[value.type], loc=op.location, ip=ir.InsertionPoint(op)
    )
    return hidden.result


def hide_all_from_fusion(op: ir.Operation) -> None:
    """Have all that reads results of ``op``, but for what returns them or asks for their sizes, take these without
    IREE's looking at what they are until kernels are formed."""
    for result in op.results:
        uses = [(use.owner, use.operand_number) for use in result.uses if use.owner.name not in (_RETURN, _SIZE)]
        if not uses:
            continue
        ip = ir.InsertionPoint.after(op)
        sizes = [size.result for size in read_open_sizes(result, ip, op.location)]
        hidden = ir.Operation.create(
            _FUSION_BARRIER, operands=[result, *sizes], results=[result.type], loc=op.location, ip=ip
        )
        for owner, number in uses:
            owner.operands[number] = hidden.result


def take_behind_barrier(value: ir.Value, op: ir.Operation, *, after: bool = False) -> ir.Value:
    """``value`` behind a barrier that stands right before ``op``, or after it, for use in its place. IREE reads no
    sizes off one: open sizes are tied to it."""
    ip, location = ir.InsertionPoint.after(op) if after else ir.InsertionPoint(op), op.location
    sizes = [size.result for size in read_open_sizes(value, ip, location)]
    hidden = add_barrier(value, ip, location)
    if not sizes:
        return hidden
    tied = ir.Operation.create(_TIE, operands=[hidden, *sizes], results=[value.type], loc=location, ip=ip)
    return tied.results[0]


def hide(value: ir.OpResult) -> None:
    """Have all that use ``value`` take it from behind one barrier."""
    uses = [(use.owner, use.operand_number) for use in value.uses]
    hidden = take_behind_barrier(value, value.owner, after=True)
    for owner, number in uses:
        owner.operands[number] = hidden


def read_open_sizes(value: ir.Value, ip: ir.InsertionPoint, location: ir.Location) -> list[ir.Operation]:
    """Ops that give the sizes of ``value`` that its type leaves open, in order."""
    type_ = ir.RankedTensorType(value.type)
    return [read_size(value, axis, ip, location) for axis in range(type_.rank) if type_.is_dynamic_dim(axis)]


def read_size(value: ir.Value, axis: int, ip: ir.InsertionPoint, location: ir.Location) -> ir.Operation:
    """An op that gives the size of an axis of ``value``."""
    number = make_index(axis, ip, location)
    return ir.Operation.create(
        _SIZE, operands=[value, number.result], results=[ir.IndexType.get()], loc=location, ip=ip
    )


def make_index(number: int, ip: ir.InsertionPoint, location: ir.Location) -> ir.Operation:
    """A constant index."""
    index = ir.IndexType.get()
    attributes = {"value": ir.IntegerAttr.get(index, number)}
    return ir.Operation.create("arith.constant", results=[index], attributes=attributes, loc=location, ip=ip)


def walk(block: ir.Block) -> Iterator[ir.Operation]:
    """The ops of a block, each followed by those inside of it."""
    for view in block.operations:
        op = view.operation
        yield op
        for region in op.regions:
            for inner in region.blocks:
                yield from walk(inner)
