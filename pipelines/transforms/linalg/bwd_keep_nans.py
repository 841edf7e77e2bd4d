# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-keep-nans``: the larger or the smaller of two numbers is no number where one of them is none."""

from __future__ import annotations

import math

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import walk
from retrograd.pipelines.transforms.helpers.generics import GENERIC, is_reduced
from retrograd.pipelines.transforms.helpers.maker import Maker

_COMPARE, _SELECT = "arith.cmpf", "arith.select"
# Of arith.cmpf: ogt, olt, and ugt, ult, which hold where a number is none too.
_GREATER, _LESS, _NOT_LESS_EQUAL, _NOT_GREATER_EQUAL = 2, 4, 9, 11
_LARGER, _SMALLER = "arith.maximumf", "arith.minimumf"
_CHOICES = {_GREATER: _LARGER, _LESS: _SMALLER}
# A number is taken unless it is beyond a bound: the predicate that fails where it is none, and what to take where the
# bound may be none too.
_CLAMPS = {_NOT_LESS_EQUAL: (_GREATER, _SMALLER), _NOT_GREATER_EQUAL: (_LESS, _LARGER)}


class BwdKeepNans(ModulePass):
    """Rewrites what elementwise bodies choose of two numbers that they compare, so that what is no number stays none.

    torch-mlir writes ``maximum`` and ``minimum`` as a comparison that fails, and ``clamp`` as one that holds, where a
    number is none: the other one, or the bound, is taken then, where PyTorch gives NaN. A training that has diverged
    would go on with finite values. Directly behind torch-mlir each body is one op of PyTorch's: a ``where`` of a
    comparison, for which the choice is right, is two of them.
    """

    description = "Give NaN for the larger or smaller of two numbers, and for clamped ones, of which one is NaN"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for op in [
                op for op in walk(only_block(func, self.name)) if op.name == GENERIC and not any(is_reduced(op))
            ]:
                for view in list(op.regions[0].blocks[0].operations):
                    if view.operation.name == _SELECT:
                        keep_nan(view.operation)


def keep_nan(select: ir.Operation) -> None:
    """Rewrite a choice between the two numbers that its condition compares."""
    condition, chosen, other = select.operands
    if not isinstance(condition, ir.OpResult) or condition.owner.name != _COMPARE:
        return
    compare = condition.owner
    left, right = compare.operands
    predicate = ir.IntegerAttr(compare.attributes["predicate"])
    if predicate.value in _CHOICES and (chosen, other) == (left, right):
        _replace(select, _CHOICES[predicate.value], left, right)
    elif predicate.value in _CLAMPS and (chosen, other) == (right, left):
        ordered, choice = _CLAMPS[predicate.value]
        if is_number(right):
            compare.attributes["predicate"] = ir.IntegerAttr.get(predicate.type, ordered)
        else:
            _replace(select, choice, left, right)


def is_number(value: ir.Value) -> bool:
    """Whether a value is a constant, and is a number."""
    if not isinstance(value, ir.OpResult) or value.owner.name != "arith.constant":
        return False
    return not math.isnan(ir.FloatAttr(value.owner.attributes["value"]).value)


def _replace(select: ir.Operation, choice: str, left: ir.Value, right: ir.Value) -> None:
    chosen = Maker.before(select).value(choice, [left, right], left.type)
    select.results[0].replace_all_uses_with(chosen)
    select.erase()
