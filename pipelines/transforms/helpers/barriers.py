# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Barriers that IREE does not look across, in linalg on tensors."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.dialects import ir
from retrograd.pipelines.transforms.helpers.maker import Maker

BARRIER = "util.optimization_barrier"
# Of IREE, which takes it away again once kernels are formed.
_FUSION_BARRIER = "iree_tensor_ext.compute_barrier.start"
_TIE = "flow.tensor.tie_shape"
_RETURN, _SIZE = "func.return", "tensor.dim"


def add_barrier(value: ir.Value, make: Maker) -> ir.Value:
    """``value`` behind a barrier."""
    return make.value(BARRIER, [value], value.type)


def hide_zero(element: ir.Type, make: Maker) -> ir.Value:
    """Make a zero that changes no number of type ``element`` to which it is added, behind a barrier: of a float the
    negative one. Of 16 bits it is an integer of the same bits, since IREE's programs for the host hold no such float;
    the loop that takes it reads it by ``read_zero``."""
    if isinstance(element, ir.IntegerType):
        return add_barrier(make.constant(ir.IntegerAttr.get(element, 0)), make)
    if isinstance(element, (ir.BF16Type, ir.F16Type)):
        bits = ir.IntegerType.get_signless(16)
        return add_barrier(make.constant(ir.IntegerAttr.get(bits, -(1 << 15))), make)
    return add_barrier(make.constant(ir.FloatAttr.get(element, -0.0, loc=make.location)), make)


def read_zero(zero: ir.Value, element: ir.Type, make: Maker) -> ir.Value:
    """Turn a zero of ``hide_zero`` into a number of type ``element``."""
    return zero if zero.type == element else make.value("arith.bitcast", [zero], element)


def hide_from_fusion(value: ir.Value, op: ir.Operation) -> ir.Value:
    """``value`` for ``op``, without IREE's looking at what it is until kernels are formed."""
    return Maker.before(op).value(_FUSION_BARRIER, [value], value.type)


def hide_all_from_fusion(op: ir.Operation) -> None:
    """Have all that reads results of ``op``, but for what returns them or asks for their sizes, take these without
    IREE's looking at what they are until kernels are formed."""
    for result in op.results:
        uses = [(use.owner, use.operand_number) for use in result.uses if use.owner.name not in (_RETURN, _SIZE)]
        if not uses:
            continue
        make = Maker.after(op)
        hidden = make.value(_FUSION_BARRIER, [result, *make.open_sizes(result)], result.type)
        for owner, number in uses:
            owner.operands[number] = hidden


def take_behind_barrier(value: ir.Value, op: ir.Operation, *, after: bool = False) -> ir.Value:
    """``value`` behind a barrier that stands right before ``op``, or after it, for use in its place. IREE reads no
    sizes off one: open sizes are tied to it."""
    make = Maker.after(op) if after else Maker.before(op)
    sizes = make.open_sizes(value)
    hidden = add_barrier(value, make)
    return make.value(_TIE, [hidden, *sizes], value.type) if sizes else hidden


def hide(value: ir.OpResult) -> None:
    """Have all that use ``value`` take it from behind one barrier."""
    uses = [(use.owner, use.operand_number) for use in value.uses]
    hidden = take_behind_barrier(value, value.owner, after=True)
    for owner, number in uses:
        owner.operands[number] = hidden


def walk(block: ir.Block) -> Iterator[ir.Operation]:
    """The ops of a block, each followed by those inside of it."""
    for view in block.operations:
        op = view.operation
        yield op
        for region in op.regions:
            for inner in region.blocks:
                yield from walk(inner)
