# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Says how ops go over rows: for each element, for each row, along rows or down columns; and where the elements lie
that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, prod
from typing import Literal

from retrograd.dialects import ir
from retrograd.pipelines.kernels.expressions import TYPES, Statements, find_combined, write_value
from retrograd.pipelines.kernels.products import ends_product
from retrograd.pipelines.transforms.helpers.generics import (
    GENERIC,
    is_elementwise,
    is_reduced,
    read_inputs,
    read_loop_sizes,
    read_maps,
)
from retrograd.pipelines.transforms.linalg.bwd_export_results import ALIAS

FEWEST = 1 << 18
"""Rows of fewer elements stay with IREE, as do those that are shorter or longer than these."""

SHORTEST, LONGEST = 64, 8192
# Offsets are of 32 bits.
_MOST = 1 << 31
STARTS = {"arith.addf": 0.0, "arith.maximumf": -inf}
"""What a sum and a maximum begin with."""

VIEWS = ("tensor.expand_shape", "tensor.collapse_shape", ALIAS)
WHOLE, ROW, COLUMN, ALL = "row * columns + column", "row", "column", "0"
"""Where elements lie that are read for each place, each row, each column, and once."""

Kind = Literal["map", "row", "along", "down", "view"]
"""How an op goes over rows: for each element; for each row; a sum along them; a sum down columns; a view of it."""


@dataclass(frozen=True)
class Space:
    """The shape that a group runs over: ``rows`` of ``columns`` elements each."""

    rows: int
    columns: int


def find_space(op: ir.Operation) -> Space | None:
    """The rows that a sum or maximum goes along, if they are of a size that has kernels here."""
    if op.name != GENERIC or len(op.results) != 1 or (sizes := _find_sizes(op)) is None:
        return None
    reduced = is_reduced(op)
    if len(sizes) < 2 or not reduced[-1] or any(reduced[:-1]):
        return None
    space = Space(prod(sizes[:-1]), sizes[-1])
    fits = SHORTEST <= space.columns <= LONGEST and FEWEST <= space.rows * space.columns < _MOST
    return space if fits else None


def classify(op: ir.Operation, space: Space) -> Kind | None:
    """How an op goes over rows; ``None`` where it does not, or computes what there are no statements for."""
    if op.name in VIEWS:
        return "view"
    # What has no loops computes one number, and goes over no rows.
    if op.name != GENERIC or len(op.results) != 1 or not read_inputs(op) or not (sizes := _find_sizes(op)):
        return None
    if str(ir.RankedTensorType(op.results[0].type).element_type) not in (*TYPES, "i1") or ends_product(op):
        return None
    kind = _find_kind(op, sizes, space)
    return kind if kind is not None and _can_be_written(op, kind) else None


def _find_kind(op: ir.Operation, sizes: Sequence[int], space: Space) -> Kind | None:
    reduced, result = is_reduced(op), find_place(op, len(op.operands) - 1, space)
    is_whole = prod(sizes) == space.rows * space.columns and sizes[-1] == space.columns
    if is_elementwise(op):
        return "map" if is_whole else "row" if prod(sizes) == space.rows else None
    if not is_whole or len(reduced) < 2 or str(ir.RankedTensorType(op.results[0].type).element_type) != "f32":
        return None
    if reduced[-1] and not any(reduced[:-1]):
        return "along" if result == ROW else None
    return "down" if not reduced[-1] and all(reduced[:-1]) and result == COLUMN else None


def _can_be_written(op: ir.Operation, kind: Kind) -> bool:
    block = op.regions[0].blocks[0]
    statements = Statements(names={argument: f"x{n}" for n, argument in enumerate(block.arguments)})
    value = find_value(op, kind)
    is_read = list(block.arguments[len(block.arguments) - 1].uses)
    return (
        value is not None and len(is_read) == (kind in ("along", "down")) and write_value(value, statements) is not None
    )


def find_value(op: ir.Operation, kind: Kind) -> ir.Value | None:
    """The value that the body of an op gives, or adds up."""
    if kind in ("map", "row"):
        (*_, end) = (view.operation for view in op.regions[0].blocks[0].operations)
        value: ir.Value = end.operands[0]
        return value
    return find_combined(op, STARTS if kind == "along" else {"arith.addf": 0.0})


def _find_sizes(op: ir.Operation) -> list[int] | None:
    """The sizes of an op's loops; ``None`` where one is open, or an operand is no tensor."""
    if not all(isinstance(operand.type, ir.RankedTensorType) for operand in op.operands):
        return None
    return read_loop_sizes(op, list(op.operands))


def find_place(op: ir.Operation, number: int, space: Space) -> str | None:
    """Where the element of an operand lies that an op reads, or writes, as text in Triton."""
    map_, sizes = read_maps(op)[number], _find_sizes(op)
    shape = ir.RankedTensorType(op.operands[number].type).shape
    if sizes is None:
        return None
    steps, strides = [0] * len(sizes), [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for expression, stride in zip(map_.results, strides, strict=True):
        if isinstance(expression, ir.AffineDimExpr):
            steps[expression.position] += stride
        elif not isinstance(expression, ir.AffineConstantExpr) or expression.value != 0:
            return None
    *leading, last = zip(sizes, steps, strict=True)
    if sizes[-1] != space.columns or prod(sizes) == space.rows:
        leading, last = [*leading, last], (1, 0)
    has_columns = last[1] == 1 and last[0] > 1
    if last[1] > 1 or (last[1] == 1 and not has_columns):
        return None
    row = _find_row([pair for pair in leading if pair[0] > 1], space.columns if has_columns else 1)
    if row is None:
        return None
    if row == ALL:
        return COLUMN if has_columns else ALL
    return f"{row} * columns + column" if has_columns else row


def _find_row(leading: Sequence[tuple[int, int]], width: int) -> str | None:
    """The number of a row, of which there are ``width`` elements each, by sizes and steps of its loops."""
    sizes, steps = [size for size, _ in leading], [step for _, step in leading]
    if not any(steps):
        return ALL
    first = next(n for n, step in enumerate(steps) if step)
    end = len(steps) - next(n for n, step in enumerate(reversed(steps)) if step)
    if any(
        outer != inner * size
        for (outer, inner), size in zip(pairwise(steps[first:end]), sizes[first + 1 : end], strict=True)
    ):
        return None
    if steps[end - 1] != width:
        return None
    within, behind = prod(sizes[first:]), prod(sizes[end:])
    row = f"{ROW} % {within}" if first else ROW
    return f"({row} // {behind})" if behind > 1 else f"({row})" if first else row
