# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which ops of a block compute the same, as IREE finds out when it merges them."""

from __future__ import annotations

from collections.abc import Hashable

from retrograd.dialects import ir

# Dialects whose ops do nothing besides giving values.
_PURE = ("arith.", "linalg.", "math.", "tensor.", "tm_tensor.")


class EqualOps:
    """Numbers for the ops of a block, equal where two do the same to operands that are the same."""

    def __init__(self, block: ir.Block) -> None:
        self._numbers: dict[ir.Operation, int] = {}
        first: dict[Hashable, int] = {}
        for number, view in enumerate(block.operations):
            op = view.operation
            key = self._describe(op, {}) if op.name.startswith(_PURE) else None
            self._numbers[op] = number if key is None else first.setdefault(key, number)

    def number(self, op: ir.Operation) -> int:
        """The number of the first op of the block that computes what ``op`` does."""
        return self._numbers[op]

    def _describe(self, op: ir.Operation, inside: dict[ir.Value, int]) -> Hashable:
        """What ``op`` does: all there is to it but for its place. ``inside`` numbers the values of the bodies that it
        is in."""
        bodies = []
        for region in op.regions:
            for block in region.blocks:
                for argument in block.arguments:
                    inside[argument] = len(inside)
                for view in block.operations:
                    inner = view.operation
                    bodies.append(self._describe(inner, inside))
                    for result in inner.results:
                        inside[result] = len(inside)
        operands = tuple(self._name(operand, inside) for operand in op.operands)
        attributes = tuple(sorted((name, str(op.attributes[name])) for name in op.attributes))
        types = tuple(str(result.type) for result in op.results)
        return op.name, operands, attributes, types, tuple(bodies)

    def _name(self, value: ir.Value, inside: dict[ir.Value, int]) -> Hashable:
        if value in inside:
            return "inside", inside[value]
        if isinstance(value, ir.OpResult):
            known = self._numbers.get(value.owner)
            if known is not None:
                return "result", known, value.result_number
        return "outside", value
