# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes the body of a ``linalg.generic`` as statements in Triton."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from retrograd.dialects import ir
from retrograd.pipelines.transforms.helpers.fills import read_number
from retrograd.pipelines.transforms.helpers.generics import read_inputs

TYPES = {"f32": "tl.float32", "bf16": "tl.bfloat16", "f16": "tl.float16", "i64": "tl.int64", "i32": "tl.int32"}
"""Triton's names of the types that expressions are of; of i1 they are truths."""

_PLAIN = {
    "arith.addf": "({} + {})",
    "arith.subf": "({} - {})",
    "arith.mulf": "({} * {})",
    "arith.negf": "(-{})",
    # As IREE and PyTorch compute them: Triton's own division and functions are approximations.
    "arith.divf": "tl.div_rn({}, {})",
    "math.exp": "libdevice.exp({})",
    "math.log": "libdevice.log({})",
    "math.sqrt": "tl.sqrt_rn({})",
    "math.rsqrt": "tl.div_rn(1.0, tl.sqrt_rn({}))",
    "math.absf": "tl.abs({})",
    "arith.select": "tl.where({}, {}, {})",
    "arith.maximumf": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "arith.minimumf": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "arith.andi": "({} & {})",
}
_MOST_FACTORS = 4
# Of numbers of 32 bits alone: those of 16 bits have no such functions.
_SINGLE = frozenset({"arith.divf", "math.exp", "math.log", "math.sqrt", "math.rsqrt"})
_COMPARED = {"oeq": "==", "ogt": ">", "oge": ">=", "olt": "<", "ole": "<=", "une": "!=", "eq": "==", "ne": "!="}
# Of floats, true of what is no number too: where these are not.
_UNLESS = {"ugt": "<=", "uge": "<", "ult": ">=", "ule": ">"}
_FLOATS = ("oeq", "ogt", "oge", "olt", "ole", "one", "ord", "ueq", "ugt", "uge", "ult", "ule", "une", "uno")
_INTEGERS = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")


@dataclass
class Statements:
    """Assignments in order, and the names of the values that they compute: each once."""

    lines: list[str] = field(default_factory=list)
    names: dict[object, str] = field(default_factory=dict)

    def assign(self, key: object, expression: str) -> str:
        """The name of a value, which ``key`` stands for from now on; the same for the same expression."""
        known = [line.partition(" = ")[2] for line in self.lines]
        number = known.index(expression) if expression in known else len(known)
        self.names[key] = f"v{number}"
        if number == len(known):
            self.lines.append(f"v{number} = {expression}")
        return self.names[key]

    def expression_of(self, name: str) -> str:
        """Read the expression that a value is computed by."""
        return next((text for line in self.lines for own, _, text in [line.partition(" = ")] if own == name), "")


def write_value(value: ir.Value, into: Statements) -> str | None:
    """The name of a value of a body, whose arguments have names; ``None`` where there is no statement for it."""
    if value in into.names:
        return into.names[value]
    if not isinstance(value, ir.OpResult):
        return None
    expression = _write_expression(value, into)
    return None if expression is None else into.assign(value, expression)


def _write_expression(value: ir.OpResult, into: Statements) -> str | None:
    op = value.owner
    if op.name == "arith.constant":
        return _write_constant(op)
    if str(value.type) not in (*TYPES, "i1"):
        return None
    if op.name == "math.fpowi":
        return _write_power(op, into)
    if op.name == "arith.truncf" and str(op.operands[0].type) == "f64":
        return _write_rounded(op.operands[0])
    operands = [write_value(operand, into) for operand in op.operands]
    if any(operand is None for operand in operands):
        return None
    if op.name in ("arith.extf", "arith.truncf"):
        return f"{operands[0]}.to({TYPES[str(value.type)]})"
    if op.name in ("arith.cmpf", "arith.cmpi"):
        names = _FLOATS if op.name == "arith.cmpf" else _INTEGERS
        number = ir.IntegerAttr(op.attributes["predicate"]).value
        # Of floats the first predicate is "false".
        name = names[number - (op.name == "arith.cmpf")]
        if op.name == "arith.cmpf" and name in _UNLESS:
            return f"(({operands[0]} {_UNLESS[name]} {operands[1]}) == 0)"
        sign = _COMPARED.get(name)
        return None if sign is None else f"({operands[0]} {sign} {operands[1]})"
    if op.name not in _PLAIN or (op.name in _SINGLE and str(value.type) != "f32"):
        return None
    return _PLAIN[op.name].format(*operands)


def _write_power(op: ir.Operation, into: Statements) -> str | None:
    """A power by a small whole number, as products."""
    exponent, base = read_number(op.operands[1]), write_value(op.operands[0], into)
    if base is None or not isinstance(exponent, ir.IntegerAttr) or not 1 <= exponent.value <= _MOST_FACTORS:
        return None
    return f"({' * '.join([base] * exponent.value)})"


def _write_rounded(value: ir.Value) -> str | None:
    """A number that has more digits than its type, which Triton rounds."""
    number = read_number(value)
    return f"({number.value!r})" if isinstance(number, ir.FloatAttr) and math.isfinite(number.value) else None


def _write_constant(op: ir.Operation) -> str | None:
    attribute, kind = op.attributes["value"], str(op.results[0].type)
    if isinstance(attribute, ir.FloatAttr) and kind in ("f32", "bf16", "f16"):
        number = attribute.value
        if math.isfinite(number):
            return f"({number!r})"
        return 'float("nan")' if math.isnan(number) else f'({"-" * (number < 0)}float("inf"))'
    if isinstance(attribute, ir.IntegerAttr) and kind in ("i64", "i32"):
        return f"({attribute.value})"
    return None


def find_combined(op: ir.Operation, starts: Mapping[str, float]) -> ir.Value | None:
    """Find what a reduction combines with its result so far, in the body of a ``linalg.generic``; ``None`` where that
    is not by one of the ops of ``starts``, beginning with the number that is given for it."""
    block, inputs = op.regions[0].blocks[0], len(read_inputs(op))
    (*_, end) = (view.operation for view in block.operations)
    combined, total = end.operands[0], block.arguments[inputs]
    if not isinstance(combined, ir.OpResult) or combined.owner.name not in starts:
        return None
    others = [operand for operand in combined.owner.operands if operand != total]
    start = read_number(op.operands[inputs])
    if len(others) != 1 or not isinstance(start, ir.FloatAttr) or start.value != starts[combined.owner.name]:
        return None
    return others[0]
