# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-sum-by-rows``: what is reduced over several axes to one number is reduced axis by axis, the last one first."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.fills import create_fill, read_number
from retrograd.pipelines.transforms.helpers.generics import (
    GENERIC,
    ITERATORS,
    MAPS,
    SEGMENTS,
    is_reduced,
    iterators_of,
    map_of_loops,
    read_inputs,
    read_loop_sizes,
    read_maps,
)
from retrograd.pipelines.transforms.helpers.maker import Maker

# What is put together, and the number that changes nothing.
_NEUTRAL = {"arith.addf": 0, "arith.addi": 0, "arith.mulf": 1, "arith.muli": 1}
# Of which the same number may be taken twice.
_EXTREMES = (
    *("arith.maximumf", "arith.minimumf", "arith.maxnumf", "arith.minnumf"),
    *("arith.maxsi", "arith.minsi", "arith.maxui", "arith.minui"),
)
# So many IREE gives to one workgroup, whatever their axes.
_MOST_OF_ONE = 256


class BwdSumByRows(ModulePass):
    """Reduces a ``linalg.generic`` over two axes or more to a single number by its last axis, to a tensor of partial
    results, and that by its last axis again, and so on.

    IREE splits such a reduction of many numbers among workgroups, and what the parts are put together by does not
    compile for a GPU ("failed to distribute"): a mean over a batch of images or of rows.
    """

    description = "Reduce to a single number axis by axis"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            block = only_block(func, self.name)
            for view in list(block.operations):
                op: ir.Operation | None = view.operation
                while op is not None and (sizes := _find_sizes(op)) is not None:
                    op = _take_last(op, sizes)


def _find_sizes(op: ir.Operation) -> list[int] | None:
    """The sizes of the axes over which an op reduces many numbers to one; ``None`` where it does not."""
    if op.name != GENERIC or len(op.results) != 1 or set(ir.RankedTensorType(op.results[0].type).shape) - {1}:
        return None
    if len(is_reduced(op)) < 2 or not all(is_reduced(op)) or not _can_be_divided(op):
        return None
    sizes = read_loop_sizes(op, read_inputs(op))
    return sizes if sizes is not None and prod(sizes) > _MOST_OF_ONE else None


def _can_be_divided(op: ir.Operation) -> bool:
    """Whether an op reduces by a function whose parts may be put together, from a number that may be there twice."""
    (block,) = op.regions[0].blocks
    *_, end = block.operations
    combined = end.operands[0].owner
    so_far = block.arguments[len(block.arguments) - 1]
    uses = list(so_far.uses)
    number = read_number(op.operands[len(op.operands) - 1])
    if not isinstance(combined, ir.OpView | ir.Operation) or len(uses) != 1 or number is None:
        return False
    name = combined.operation.name
    is_neutral = name in _EXTREMES or _NEUTRAL.get(name) == number.value
    return is_neutral and bool(uses[0].owner.operation == combined.operation)


def _take_last(op: ir.Operation, sizes: Sequence[int]) -> ir.Operation:
    """Reduce over the last axis only, and what that gives over the others; returns the op that does the latter."""
    make, count = Maker.before(op), len(sizes)
    inside = range(count - 1)
    first = op.operands[len(op.operands) - 1]
    element = ir.RankedTensorType(first.type).element_type
    partial = ir.RankedTensorType.get(sizes[:-1], element, loc=op.location)
    number = read_number(first)
    assert number is not None, "asked by _can_be_divided"
    filled = create_fill(number, make.empty(partial), make)
    rows = op.clone(ip=make.ip)
    rows.operands[len(rows.operands) - 1] = filled
    rows.results[0].set_type(partial)
    maps = [*read_maps(op)[:-1], map_of_loops(inside, count)]
    # An axis of one number may be left.
    only = ir.AffineMap.get(count - 1, 0, [ir.AffineConstantExpr.get(0)] * ir.RankedTensorType(first.type).rank)
    rows.attributes[MAPS] = ir.ArrayAttr.get([ir.AffineMapAttr.get(indices) for indices in maps])
    rows.attributes[ITERATORS] = iterators_of(count - 1, 1)
    outer = [ir.AffineMapAttr.get(indices) for indices in (map_of_loops(inside, count - 1), only)]
    attributes = {
        MAPS: ir.ArrayAttr.get(outer),
        ITERATORS: iterators_of(0, count - 1),
        SEGMENTS: ir.DenseI32ArrayAttr.get([1, 1]),
    }
    whole = make.op(GENERIC, [rows.results[0], first], [op.results[0].type], attributes, regions=1)
    _fill_body(op, whole, element)
    op.results[0].replace_all_uses_with(whole.results[0])
    op.erase()
    return whole


def _fill_body(like: ir.Operation, made: ir.Operation, element: ir.Type) -> None:
    """Have ``made`` put numbers together as ``like`` does."""
    (block,) = like.regions[0].blocks
    *_, end = block.operations
    body = made.regions[0].blocks.append(element, element, arg_locs=[like.location] * 2)
    with ir.InsertionPoint(body), like.location:
        combined = end.operands[0].owner.operation.clone()
        for place in range(2):
            combined.operands[place] = body.arguments[place]
        Maker().op("linalg.yield", [combined.results[0]])
