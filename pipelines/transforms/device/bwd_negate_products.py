# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-negate-products``: sums of products with a factor that is broadcast, in a form that compiles for a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.generics import GENERIC, count_inputs, is_elementwise, is_reduced, read_maps
from retrograd.pipelines.transforms.helpers.maker import Maker

# A sum, by the product that IREE joins with it.
_SUMS = {"arith.addf": "arith.mulf", "arith.addi": "arith.muli"}
Axes = Mapping[ir.Value, frozenset[int]]


class BwdNegateProducts(ModulePass):
    """Writes the product ``a * b`` that a sum reads as ``-(-a * b)`` where IREE would not compile the two.

    IREE makes one ``vector.contract`` of a product and a sum over it, and takes the broadcasting of a factor into that,
    also along a loop that is summed over, where its tiles have one element. A contraction with such a loop in one
    factor alone is none: ``(loss * class_weights).sum()`` failed. Of a negated product it makes no contraction; LLVM
    takes the two signs away again.

    The factor concerned lacks a loop of the sum that stands in front of one that it has.
    """

    description = "Write sums of products with a broadcast factor as a CPU's compiler takes them"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            ops = [view.operation for view in only_block(func, self.name).operations]
            axes = find_axes(ops)
            for product, loops in find_summed(ops):
                if (factors := _read_factors(product)) and any(
                    lacks_outer_loop(find_loops(factor, product, axes), loops) for factor in factors
                ):
                    negate(list(product.regions[0].blocks[0].operations)[-1].operands[0].owner)


def find_summed(ops: Iterable[ir.Operation]) -> list[tuple[ir.Operation, list[int]]]:
    """Each elementwise op that yields a product which a sum reads, with its loops that are summed over, the outermost
    first."""
    found = []
    for op in ops:
        if op.name != GENERIC or not any(is_reduced(op)) or count_inputs(op) != 1:
            continue
        source = op.operands[0].owner
        *_, end = (view.operation for view in op.regions[0].blocks[0].operations)
        wanted = _SUMS.get(_name_of(end.operands[0]))
        if not is_elementwise(source) or wanted is None:
            continue
        *_, yielded = (view.operation for view in source.regions[0].blocks[0].operations)
        if _name_of(yielded.operands[0]) != wanted:
            continue
        order = {expr.position: axis for axis, expr in enumerate(read_maps(op)[0].results) if _is_loop(expr)}
        summed = [order[loop] for loop, reduced in enumerate(is_reduced(op)) if reduced and loop in order]
        found.append((source, summed))
    return found


def find_axes(ops: Iterable[ir.Operation]) -> Axes:
    """The axes along which the result of each elementwise op changes; what is not in here may change along all."""
    axes: dict[ir.Value, frozenset[int]] = {}
    for op in ops:
        if is_elementwise(op):
            axes[op.results[0]] = frozenset().union(*(find_input_loops(op, i, axes) for i in range(count_inputs(op))))
    return axes


def find_loops(value: ir.Value, op: ir.Operation, axes: Axes) -> frozenset[int]:
    """The loops of the elementwise ``op`` along which ``value``, a number in its body, changes."""
    body, found, waiting, seen = op.regions[0].blocks[0], frozenset[int](), [value], set[ir.Value]()
    while waiting:
        if (value := waiting.pop()) in seen:
            continue
        seen.add(value)
        if isinstance(value, ir.BlockArgument):
            if value.owner == body and value.arg_number < count_inputs(op):
                found |= find_input_loops(op, value.arg_number, axes)
        elif value.owner.name == "linalg.index":
            found |= {ir.IntegerAttr(value.owner.attributes["dim"]).value}
        else:
            waiting += value.owner.operands
    return found


def find_input_loops(op: ir.Operation, number: int, axes: Axes) -> frozenset[int]:
    """The loops of ``op`` along which what it reads of an input changes; an index that is no plain loop stands for
    none, as does one into an axis along which the input is the same."""
    value, map_ = op.operands[number], read_maps(op)[number]
    varying = axes.get(value, frozenset(range(len(map_.results))))
    return frozenset(e.position for i, e in enumerate(map_.results) if i in varying and _is_loop(e))


def lacks_outer_loop(own: frozenset[int], loops: Sequence[int]) -> bool:
    """Whether a factor with the loops ``own`` lacks one of ``loops`` (the outermost first) in front of one it has."""
    has = [loop in own for loop in loops]
    return True in has and False in has[: len(has) - has[::-1].index(True)]


def negate(product: ir.Operation) -> None:
    """Put ``-(-a * b)`` in the place of the product ``a * b``."""
    product.operands[0] = _negative(product.operands[0], Maker.before(product))
    value = _negative(product.results[0], Maker.after(product))
    product.results[0].replace_all_uses_except(value, value.owner.operation)


def _negative(value: ir.Value, make: Maker) -> ir.Value:
    if isinstance(value.type, ir.FloatType):
        return make.value("arith.negf", [value], value.type)
    return make.value("arith.subi", [make.constant(ir.IntegerAttr.get(value.type, 0)), value], value.type)


def _read_factors(op: ir.Operation) -> list[ir.Value]:
    """The factors of the product that an op's body yields."""
    *_, end = (view.operation for view in op.regions[0].blocks[0].operations)
    return list(end.operands[0].owner.operands)


def _name_of(value: ir.Value) -> str:
    """The name of the op that gives a value; none for an argument."""
    return value.owner.name if isinstance(value, ir.OpResult) else ""


def _is_loop(expr: ir.AffineExpr) -> bool:
    return isinstance(expr, ir.AffineDimExpr)
