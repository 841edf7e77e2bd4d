# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-keep-roundings``: bfloat16 numbers that are compared for equality are rounded wherever they are computed."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import walk
from retrograd.pipelines.transforms.helpers.copies import copy_form
from retrograd.pipelines.transforms.helpers.fills import read_number
from retrograd.pipelines.transforms.helpers.generics import GENERIC, is_reduced, read_inputs
from retrograd.pipelines.transforms.helpers.maker import Maker

_COMPARE, _ROUND = "arith.cmpf", "arith.truncf"
# oeq, one, ueq, une; and which is greater: ogt, oge, olt, ole, ugt, uge, ult, ule.
_EQUALITIES, _ORDERS = (1, 6, 8, 13), (2, 3, 4, 5, 9, 10, 11, 12)
# Those of `arith` whose result may have to be rounded; all functions of `math` are rounded too.
_ROUNDED = ("arith.addf", "arith.subf", "arith.mulf", "arith.divf", "arith.remf", "arith.sitofp", "arith.uitofp")
_EXACT = ("math.absf", "math.copysign", "math.ceil", "math.floor", "math.trunc", "math.round", "math.roundeven")

_FORM = """
func.func @round(%x: f32) -> f32 {
  %sixteen = arith.constant 16 : i32
  %one = arith.constant 1 : i32
  %below_half = arith.constant 32767 : i32
  %kept = arith.constant -65536 : i32
  %bits = arith.bitcast %x : f32 to i32
  %high = arith.shrui %bits, %sixteen : i32
  %odd = arith.andi %high, %one : i32
  %up = arith.addi %bits, %below_half : i32
  %even = arith.addi %up, %odd : i32
  %cut = arith.andi %even, %kept : i32
  %rounded = arith.bitcast %cut : i32 to f32
  %is_nan = arith.cmpf uno, %x, %x : f32
  %value = arith.select %is_nan, %x, %rounded : f32
  return %value : f32
}
"""


class BwdKeepRoundings(ModulePass):
    """Computes bfloat16 ops in f32 and rounds their results by arithmetic on bits, in modules that ask whether two
    tensors' elements are equal, or where the greatest element is.

    The gradient of a maximum goes where an element equals it, and of equal elements the first is the greatest. LLVM
    takes a rounding to bfloat16 that is widened again for none, so that a number has other digits in the kernel that
    computes it than in memory: no element equals the maximum then, and the gradient is 0 / 0. What is done to bits
    stays. Modules without such a question keep the machine's own conversions, which are faster.
    """

    description = "Round bfloat16 wherever it is computed, where elements are compared for equality"

    def apply(self, module: ir.Operation) -> None:
        ops = [op for func in functions(module) for op in walk(only_block(func, self.name))]
        generics = [op for op in ops if op.name == GENERIC]
        bodies = [view.operation for generic in generics for view in generic.regions[0].blocks[0].operations]
        found = [op for op in bodies if is_rounded(op)]
        if not found or not any(tells_equals(generic) for generic in generics):
            return
        form = ir.Module.parse(_FORM)
        for op in found:
            keep(op, form)


def is_rounded(op: ir.Operation) -> bool:
    """Whether ``op`` computes a single bfloat16 number that may not be the exact result."""
    if len(op.results) != 1 or not isinstance(op.results[0].type, ir.BF16Type):
        return False
    if op.name == _ROUND:
        return isinstance(op.operands[0].type, ir.F32Type)
    return op.name in _ROUNDED or (op.name.startswith("math.") and op.name not in _EXACT)


def tells_equals(generic: ir.Operation) -> bool:
    """Whether what a ``linalg.generic`` gives depends on which elements of two tensors are equal, by comparing them for
    it, or for which is greater while it looks for the place of one: not with a constant, nor those of one tensor with
    themselves, which asks for NaN."""
    places = [r for r in generic.results if isinstance(ir.RankedTensorType(r.type).element_type, ir.IntegerType)]
    is_search = any(is_reduced(generic)) and any(list(place.uses) for place in places)
    asked = (*_EQUALITIES, *_ORDERS) if is_search else _EQUALITIES
    block = generic.regions[0].blocks[0]
    tensors = dict(zip(block.arguments, read_inputs(generic), strict=False))
    for view in block.operations:
        op = view.operation
        if op.name != _COMPARE or ir.IntegerAttr(op.attributes["predicate"]).value not in asked:
            continue
        sides = [tensors.get(side, side) for side in op.operands]
        if sides[0] != sides[1] and all(read_number(side) is None for side in sides):
            return True
    return False


def keep(op: ir.Operation, form: ir.Module) -> None:
    """Compute ``op`` in f32 and round its result by ``form``."""
    make, narrow, wide = Maker.before(op), ir.BF16Type.get(), ir.F32Type.get()
    value = op.operands[0]
    if op.name != _ROUND:
        operands = [make.value("arith.extf", [v], wide) if v.type == narrow else v for v in op.operands]
        value = make.value(op.name, operands, wide, {name: op.attributes[name] for name in op.attributes})
    (rounded,) = copy_form(form, [value], op)
    result = make.value(_ROUND, [rounded], narrow)
    op.results[0].replace_all_uses_with(result)
    op.erase()
