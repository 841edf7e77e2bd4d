# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-keep-nans``: the larger or the smaller of two numbers is no number where one of them is none, and that is where
it is found."""

from __future__ import annotations

import math

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import walk
from retrograd.pipelines.transforms.helpers.generics import GENERIC, is_reduced
from retrograd.pipelines.transforms.helpers.maker import Maker

_COMPARE, _SELECT, _ELEMENT = "arith.cmpf", "arith.select", "tensor.extract"
# Of arith.cmpf: oeq, ogt, olt, and ugt, ult, which hold where a number is none too; whether both are numbers, or not.
_EQUAL, _GREATER, _LESS, _NOT_LESS_EQUAL, _NOT_GREATER_EQUAL, _BOTH, _NOT_BOTH = 1, 2, 4, 9, 11, 7, 14
_LARGER, _SMALLER = "arith.maximumf", "arith.minimumf"
_CHOICES = {_GREATER: _LARGER, _LESS: _SMALLER}
# A number is taken unless it is beyond a bound: the predicate that fails where it is none, and what to take where the
# bound may be none too.
_CLAMPS = {_NOT_LESS_EQUAL: (_GREATER, _SMALLER), _NOT_GREATER_EQUAL: (_LESS, _LARGER)}
_OR_NONE = {_GREATER: _NOT_LESS_EQUAL, _LESS: _NOT_GREATER_EQUAL}


class BwdKeepNans(ModulePass):
    """Rewrites what elementwise bodies choose of two numbers that they compare, so that what is no number stays none.

    torch-mlir writes ``maximum`` and ``minimum`` as a comparison that fails, and ``clamp`` as one that holds, where a
    number is none: the other one, or the bound, is taken then, where PyTorch gives NaN. A training that has diverged
    would go on with finite values. Directly behind torch-mlir each body is one op of PyTorch's: a ``where`` of a
    comparison, for which the choice is right, is two of them.

    Where the largest or smallest of many is, it is also the first that is no number, and in a window of a pool the
    last one, as in PyTorch. torch-mlir passes them by: a gradient would reach another element, or none.
    """

    description = (
        "Give NaN, and its place, for the larger or smaller of numbers of which one is NaN, and for clamped ones"
    )

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for op in [op for op in walk(only_block(func, self.name)) if op.name == GENERIC]:
                body = [view.operation for view in op.regions[0].blocks[0].operations]
                keep = _keep_place if any(is_reduced(op)) else keep_nan
                for select in [op for op in body if op.name == _SELECT]:
                    keep(select)


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


def _keep_place(select: ir.Operation) -> None:
    """Rewrite a choice between two places, the one of a number that is compared and the one of the best so far."""
    condition, place, _ = select.operands
    if not isinstance(condition, ir.OpResult) or condition.owner.name != _COMPARE or not _is_whole(place):
        return
    compare = condition.owner
    number, best = compare.operands
    predicate = ir.IntegerAttr(compare.attributes["predicate"]).value
    if predicate in _OR_NONE and all(isinstance(value, ir.BlockArgument) for value in (number, best)):
        make = Maker.before(select)
        beats = _compare(make, _OR_NONE[predicate], number, best)
        wins = make.value("arith.andi", [beats, _compare(make, _BOTH, best, best)], condition.type)
        select.operands[0] = wins
    elif predicate == _EQUAL and isinstance(number, ir.OpResult) and number.owner.name == _ELEMENT:
        last = list(select.parent.regions[0].blocks[0].operations)[-1].operation
        make = Maker.before(last)
        is_none = _compare(make, _NOT_BOTH, number, number)
        last.operands[0] = make.value(_SELECT, [is_none, place, last.operands[0]], place.type)


def _is_whole(value: ir.Value) -> bool:
    return isinstance(value.type, ir.IntegerType) and value.type.width > 1


def _compare(make: Maker, predicate: int, left: ir.Value, right: ir.Value) -> ir.Value:
    attribute = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), predicate)
    return make.value(_COMPARE, [left, right], ir.IntegerType.get_signless(1), {"predicate": attribute})


def is_number(value: ir.Value) -> bool:
    """Whether a value is a constant, and is a number."""
    if not isinstance(value, ir.OpResult) or value.owner.name != "arith.constant":
        return False
    return not math.isnan(ir.FloatAttr(value.owner.attributes["value"]).value)


def _replace(select: ir.Operation, choice: str, left: ir.Value, right: ir.Value) -> None:
    chosen = Maker.before(select).value(choice, [left, right], left.type)
    select.results[0].replace_all_uses_with(chosen)
    select.erase()
