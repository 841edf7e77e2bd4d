# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads the inputs and maps of a ``linalg.generic``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from retrograd.dialects import ir

GENERIC = "linalg.generic"
MAPS, ITERATORS, SEGMENTS = "indexing_maps", "iterator_types", "operandSegmentSizes"


def count_inputs(op: ir.Operation) -> int:
    """How many of the operands of a ``linalg.generic`` it reads only."""
    return int(ir.DenseI32ArrayAttr(op.attributes[SEGMENTS])[0])


def read_maps(op: ir.Operation) -> list[ir.AffineMap]:
    """The indexing maps of a ``linalg.generic``, an operand each."""
    return [ir.AffineMapAttr(a).value for a in ir.ArrayAttr(op.attributes[MAPS])]


def map_of_loops(loops: Sequence[int], count: int) -> ir.AffineMap:
    """The indexing map of what is read by these loops, in order, of so many."""
    return ir.AffineMap.get(count, 0, [ir.AffineDimExpr.get(loop) for loop in loops])


def iterators_of(parallel: int, reduced: int = 0) -> ir.ArrayAttr:
    """The iterator types of so many loops that run by themselves, and inside of them so many that are summed over."""
    kinds = ["parallel"] * parallel + ["reduction"] * reduced
    return ir.ArrayAttr.get([ir.Attribute.parse(f"#linalg.iterator_type<{kind}>") for kind in kinds])


def reads_by(op: ir.Operation, operands: Sequence[Sequence[int]], count: int) -> bool:
    """Whether a product, of so many loops, reads its operands by these; without maps of its own it reads them plainly,
    which these are taken to say."""
    return MAPS not in op.attributes or read_maps(op) == [map_of_loops(loops, count) for loops in operands]


def read_inputs(op: ir.Operation) -> list[ir.Value]:
    """The operands that a ``linalg.generic`` reads only."""
    return list(op.operands)[: count_inputs(op)]


def read_loop_sizes(op: ir.Operation, operands: Sequence[ir.Value]) -> list[int] | None:
    """How often each loop of a ``linalg.generic`` runs, by the shapes of its first ``operands``; ``None`` where a size
    is open, or no axis of a tensor among these is read by that loop alone."""
    sizes: dict[int, int] = {}
    maps = read_maps(op)
    for operand, indices in zip(operands, maps, strict=False):
        if not isinstance(operand.type, ir.RankedTensorType):
            continue
        type_ = ir.RankedTensorType(operand.type)
        if not type_.has_static_shape:
            return None
        for expression, size in zip(indices.results, type_.shape, strict=True):
            if isinstance(expression, ir.AffineDimExpr):
                sizes[expression.position] = size
    count = maps[0].n_dims
    return [sizes[loop] for loop in range(count)] if len(sizes) == count else None


def is_reduced(op: ir.Operation) -> list[bool]:
    """For each loop of a ``linalg.generic``, whether it sums, or combines otherwise, over it."""
    return ["reduction" in str(kind) for kind in ir.ArrayAttr(op.attributes[ITERATORS])]


def is_elementwise(op: ir.Operation | ir.Block) -> bool:
    """Whether an op computes one result element by element, in the order of its loops, from what it reads."""
    if isinstance(op, ir.Block) or op.name != GENERIC or any(is_reduced(op)) or len(op.results) != 1:
        return False
    result = read_maps(op)[-1]
    return bool(result == ir.AffineMap.get_identity(result.n_dims))


def is_arithmetic(op: ir.Operation) -> bool:
    """Whether an elementwise op takes no function such as ``exp``, and reads nothing of what it writes to."""
    if not is_elementwise(op):
        return False
    start = op.operands[len(op.operands) - 1]
    body = [view.operation.name for view in op.regions[0].blocks[0].operations]
    is_empty = isinstance(start, ir.OpResult) and start.owner.name == "tensor.empty"
    return is_empty and all(name == "linalg.yield" or name.startswith("arith.") for name in body)


def count_bits(element: ir.Type) -> int:
    """Bits of an integer or a float."""
    return int(element.width) if isinstance(element, (ir.IntegerType, ir.FloatType)) else 0


def count_bytes(value: ir.Value) -> int | None:
    """Bytes of a tensor in memory; ``None`` if its size is open."""
    type_ = ir.RankedTensorType(value.type)
    return prod(type_.shape) * max(1, count_bits(type_.element_type) // 8) if type_.has_static_shape else None
