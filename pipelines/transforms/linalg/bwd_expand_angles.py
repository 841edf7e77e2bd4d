# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-expand-angles``: angles of points of which both numbers are zero or infinite, and their signs."""

from __future__ import annotations

import math

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import walk
from retrograd.pipelines.transforms.helpers.maker import Maker

_ANGLE, _SIGN = "math.atan2", "math.copysign"
# Of arith.cmpf.
_EQUAL = 1


class BwdExpandAngles(ModulePass):
    """Asks ``atan2`` for angles of the upper half alone, of points that have a quotient.

    IREE computes ``atan2(y, x)`` from the quotient of the two: NaN where both are zero, as the phase of silence, and
    where both are infinite. These become points of the same angle, 1 to the side and 0 or 1 up. It loses the sign of a
    ``y`` that is a negative zero, and that of a quotient which is too small: the angle of ``|y|`` gets it behind.
    """

    description = "Write out the signs of atan2, which IREE loses, and where both of its numbers are zero or infinite"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for op in [op for op in walk(only_block(func, self.name)) if op.name == _ANGLE]:
                angle = _expand(Maker.before(op), *op.operands)
                op.results[0].replace_all_uses_with(angle)
                op.erase()


def _expand(make: Maker, y: ir.Value, x: ir.Value) -> ir.Value:
    bit = ir.IntegerType.get_signless(1)

    def op(name: str, *operands: ir.Value) -> ir.Value:
        return make.value(name, operands, operands[-1].type)

    def constant(number: float) -> ir.Value:
        return make.constant(ir.FloatAttr.get(y.type, number, loc=make.location))

    def are(number: ir.Value, *values: ir.Value) -> ir.Value:
        attribute = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), _EQUAL)
        first, second = (make.value("arith.cmpf", [v, number], bit, {"predicate": attribute}) for v in values)
        return op("arith.andi", first, second)

    height, width, one = op("math.absf", y), op("math.absf", x), constant(1.0)
    none, all_ = are(constant(0.0), height, width), are(constant(math.inf), height, width)
    side = op("arith.select", op("arith.ori", none, all_), op(_SIGN, one, x), x)
    angle = op(_ANGLE, op("arith.select", all_, one, height), side)
    return op(_SIGN, angle, y)
