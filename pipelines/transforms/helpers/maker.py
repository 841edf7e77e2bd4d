# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Makes ops, of any dialect, at one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from retrograd.dialects import ir


@dataclass(frozen=True)
class Maker:
    """Makes ops at a place of a block, all with one location; without either, at the current ones."""

    ip: ir.InsertionPoint | None = None
    location: ir.Location | None = None

    @classmethod
    def before(cls, op: ir.Operation) -> Maker:
        """Make a maker that puts ops in front of another, with its location."""
        return cls(ir.InsertionPoint(op), op.location)

    @classmethod
    def after(cls, op: ir.Operation) -> Maker:
        """Make a maker that puts ops behind another, with its location."""
        return cls(ir.InsertionPoint.after(op), op.location)

    def op(
        self,
        name: str,
        operands: Sequence[ir.Value] = (),
        results: Sequence[ir.Type] = (),
        attributes: Mapping[str, ir.Attribute] | None = None,
        *,
        regions: int = 0,
    ) -> ir.Operation:
        """A new op. IREE's are unknown here: modules that hold them are read with unregistered dialects allowed."""
        given = dict(attributes or {})
        return ir.Operation.create(name, results, operands, given, regions=regions, loc=self.location, ip=self.ip)

    def value(
        self,
        name: str,
        operands: Sequence[ir.Value],
        type_: ir.Type,
        attributes: Mapping[str, ir.Attribute] | None = None,
    ) -> ir.Value:
        """The result, of ``type_``, of a new op that has one."""
        return self.op(name, operands, [type_], attributes).results[0]

    def constant(self, number: ir.Attribute) -> ir.Value:
        """An ``arith.constant``, of the type of the attribute."""
        return self.value("arith.constant", [], number.type, {"value": number})

    def index(self, number: int) -> ir.Value:
        """A constant index."""
        return self.constant(ir.IntegerAttr.get(ir.IndexType.get(), number))

    def empty(self, type_: ir.Type, sizes: Sequence[ir.Value] = ()) -> ir.Value:
        """Storage of ``type_``, with the sizes that it leaves open."""
        return self.value("tensor.empty", sizes, type_)

    def size(self, value: ir.Value, axis: int) -> ir.Value:
        """The size of an axis of ``value``."""
        return self.value("tensor.dim", [value, self.index(axis)], ir.IndexType.get())

    def open_sizes(self, value: ir.Value) -> list[ir.Value]:
        """The sizes of ``value`` that its type leaves open, in order."""
        type_ = ir.RankedTensorType(value.type)
        return [self.size(value, axis) for axis in range(type_.rank) if type_.is_dynamic_dim(axis)]
