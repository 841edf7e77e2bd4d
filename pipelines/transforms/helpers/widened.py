# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensors that were widened from 16 bits, as they were before: what moved the wide ones then moves the narrow ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from retrograd.dialects import ir
from retrograd.pipelines.transforms.helpers.fills import is_zero
from retrograd.pipelines.transforms.helpers.generics import GENERIC, count_inputs, is_elementwise, read_maps
from retrograd.pipelines.transforms.helpers.maker import Maker

_WIDEN = "arith.extf"
# Ops that give another place, or another shape, to the elements of their first operand.
_MOVES = ("tensor.collapse_shape", "tensor.expand_shape", "tensor.extract_slice")
_PAD, _CONCAT, _TRANSPOSE = "tensor.pad", "tensor.concat", "linalg.transpose"


@dataclass
class Widened:
    """Knows which tensors of one function were widened, and from which types; makes narrow forms once each."""

    elements: dict[ir.Value, ir.Type | None] = field(default_factory=dict)
    made: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def find_element(self, value: ir.Value) -> ir.Type | None:
        """The type of 16 bits that all elements of ``value`` were widened to f32 from, if they were."""
        if value not in self.elements:
            self.elements[value] = self._find_element(value)
        return self.elements[value]

    def _find_element(self, value: ir.Value) -> ir.Type | None:
        op = value.owner if isinstance(value, ir.OpResult) else None
        if op is None or not isinstance(ir.RankedTensorType(value.type).element_type, ir.F32Type):
            return None
        if op.name == _CONCAT:
            found = {self.find_element(operand) for operand in op.operands}
            return found.pop() if len(found) == 1 else None
        if op.name in (*_MOVES, _TRANSPOSE) or (op.name == _PAD and is_zero(_filling(op))) or is_copy(op):
            return self.find_element(op.operands[0])
        return widened_from(op)

    def narrow(self, value: ir.Value) -> ir.Value:
        """``value``, of which :meth:`find_element` gave a type, in that type."""
        if value not in self.made:
            self.made[value] = self._narrow(value.owner)
        return self.made[value]

    def erase_unread(self) -> None:
        """Take away what is no longer read of the wide tensors that have a narrow form."""
        # Each came after what it reads.
        for value in reversed(self.made):
            if not list(value.uses):
                value.owner.erase()

    def _narrow(self, op: ir.Operation) -> ir.Value:
        if widened_from(op) is not None:
            return op.operands[0]
        element = self.find_element(op.results[0])
        type_ = ir.RankedTensorType.get(ir.RankedTensorType(op.results[0].type).shape, element, loc=op.location)
        sources = [self.narrow(operand) for operand in (op.operands if op.name == _CONCAT else [op.operands[0]])]
        copy = op.clone(ip=ir.InsertionPoint(op)).operation
        for number, source in enumerate(sources):
            copy.operands[number] = source
        make = Maker.before(copy)
        if op.name in (_TRANSPOSE, GENERIC):
            copy.operands[1] = make.empty(type_, make.open_sizes(op.operands[1]))
            for argument in copy.regions[0].blocks[0].arguments:
                argument.set_type(element)
        if op.name == _PAD:
            end = list(copy.regions[0].blocks[0].operations)[-1].operation
            end.operands[0] = make.constant(ir.FloatAttr.get(element, 0.0, loc=op.location))
        copy.results[0].set_type(type_)
        return copy.results[0]


def widened_from(op: ir.Operation) -> ir.Type | None:
    """The type of 16 bits that an op widens a tensor from, element by element, if it does no more."""
    if op.name != GENERIC or count_inputs(op) != 1 or not is_elementwise(op) or read_maps(op)[0] != read_maps(op)[-1]:
        return None
    first, *rest = (view.operation.name for view in op.regions[0].blocks[0].operations)
    element = ir.RankedTensorType(op.operands[0].type).element_type
    is_narrow = isinstance(element, (ir.BF16Type, ir.F16Type))
    return element if first == _WIDEN and len(rest) == 1 and is_narrow else None


def is_copy(op: ir.Operation) -> bool:
    """Whether an op gives the elements of one tensor as they are, transposed or spread."""
    if op.name != GENERIC or count_inputs(op) != 1 or len(op.operands) != 2 or not is_elementwise(op):
        return False
    block = op.regions[0].blocks[0]
    (end, *more) = (view.operation for view in block.operations)
    return not more and end.operands[0] == block.arguments[0]


def _filling(pad: ir.Operation) -> ir.Value:
    """Return the value that a ``tensor.pad`` fills up with."""
    return list(pad.regions[0].blocks[0].operations)[-1].operation.operands[0]
