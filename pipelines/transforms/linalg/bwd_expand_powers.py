# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-expand-powers``: powers of numbers that are not above zero."""

from __future__ import annotations

import math

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import walk
from retrograd.pipelines.transforms.helpers.maker import Maker

_POWER, _WHOLE_POWER, _CONSTANT = "math.powf", "math.fpowi", "arith.constant"
# Of arith.cmpf.
_EQUAL, _LESS = 1, 4


class BwdExpandPowers(ModulePass):
    """Writes out the powers that IREE computes by a logarithm, or gives the wrong infinity for.

    IREE writes ``a ** b`` as ``exp(b * log(a))``: NaN for each ``a`` below zero, where whole exponents have a power,
    and for each exponent of zero of what has no finite logarithm. The power is taken of ``|a|`` here, and gets its sign
    behind. A power by a constant whole exponent below zero is ``-inf`` at zero in IREE; here it is a quotient. A
    constant base above zero, and a constant exponent that is not whole, stay: of them the logarithm is right.
    """

    description = "Write out powers of what may be negative or zero, which IREE computes by the logarithm"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for op in [op for op in walk(only_block(func, self.name)) if op.name in (_POWER, _WHOLE_POWER)]:
                expand = _expand if op.name == _POWER else _expand_whole
                power = expand(Maker.before(op), *op.operands)
                if power is not None:
                    op.results[0].replace_all_uses_with(power)
                    op.erase()


def _number(value: ir.Value) -> float | None:
    """The number that a value is, if it is a constant."""
    if not isinstance(value, ir.OpResult) or value.owner.name != _CONSTANT:
        return None
    attribute = value.owner.attributes["value"]
    return float(attribute.value) if isinstance(attribute, ir.FloatAttr | ir.IntegerAttr) else None


def _expand_whole(make: Maker, base: ir.Value, exponent: ir.Value) -> ir.Value | None:
    """``1 / base ** -n`` for a constant n below zero."""
    number = _number(exponent)
    if number is None or number >= 0:
        return None
    below = base
    if number != -1:
        opposite = make.constant(ir.IntegerAttr.get(exponent.type, -int(number)))
        below = make.value(_WHOLE_POWER, [base, opposite], base.type)
    return make.value(
        "arith.divf", [make.constant(ir.FloatAttr.get(base.type, 1.0, loc=make.location)), below], base.type
    )


def _expand(make: Maker, base: ir.Value, exponent: ir.Value) -> ir.Value | None:
    known, number = _number(base), _number(exponent)
    if (known is not None and 0 < known < math.inf and known != 1) or (number is not None and number % 1 != 0):
        return None
    kind, bit = base.type, ir.IntegerType.get_signless(1)

    def constant(value: float) -> ir.Value:
        return make.constant(ir.FloatAttr.get(kind, value, loc=make.location))

    def compare(predicate: int, a: ir.Value, b: ir.Value) -> ir.Value:
        attribute = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), predicate)
        return make.value("arith.cmpf", [a, b], bit, {"predicate": attribute})

    def op(name: str, *operands: ir.Value) -> ir.Value:
        return make.value(name, operands, operands[-1].type)

    zero, one, two = constant(0.0), constant(1.0), constant(2.0)
    size = op("math.absf", base)
    power = op(_POWER, size, exponent)
    # As in C: of 1, and by 0, it is 1 whatever the other is.
    is_one = op("arith.ori", compare(_EQUAL, size, one), compare(_EQUAL, exponent, zero))
    power = op("arith.select", is_one, one, power)
    # Of an infinite exponent, which is even, the rest is no number.
    rest = op("arith.subf", exponent, op("arith.mulf", op("math.floor", op("arith.divf", exponent, two)), two))
    is_odd = compare(_EQUAL, rest, one)
    power = op("arith.select", is_odd, op("math.copysign", power, base), power)
    is_below = op("arith.andi", compare(_LESS, base, zero), compare(_LESS, size, constant(math.inf)))
    is_whole = compare(_EQUAL, op("math.floor", exponent), exponent)
    is_none = op("arith.andi", is_below, op("arith.xori", is_whole, make.constant(ir.IntegerAttr.get(bit, 1))))
    return op("arith.select", is_none, constant(math.nan), power)
