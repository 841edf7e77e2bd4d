# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds sums down columns and writes what a kernel computes of each element before it adds up: ops that are computed
element by element are part of the sum, unless their result is in memory in any case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from retrograd.dialects import ir
from retrograd.pipelines.kernels.column_text import MEAN
from retrograd.pipelines.kernels.expressions import TYPES, Statements, find_combined, write_value
from retrograd.pipelines.transforms.helpers.fills import read_number
from retrograd.pipelines.transforms.helpers.generics import (
    GENERIC,
    count_bits,
    is_elementwise,
    is_reduced,
    read_inputs,
    read_maps,
)

FEWEST = 1 << 18
"""Tensors of fewer elements stay with IREE, as do those of fewer columns or rows than these."""

FEWEST_COLUMNS, FEWEST_ROWS = 16, 256
# What is computed of more than so many times its size is read, where others read it too.
_FARTHEST = 2
_ELEMENTS = (*TYPES, "i1")
RESHAPES = ("tensor.expand_shape", "tensor.collapse_shape")
# Of a number in f32, times its inverse.
_ROUNDING = 1e-6
# Where a number of each row lies.
_OF_ROW = "row"


@dataclass
class Body:
    """The buffers that a kernel reads, those of rows among them, what it reads once for all rows, and what it computes
    of each element."""

    shape: tuple[int, ...]
    buffers: list[ir.Value] = field(default_factory=list)
    whole: list[ir.Value] = field(default_factory=list)
    once: list[str] = field(default_factory=list)
    statements: Statements = field(default_factory=Statements)
    # The sum whose mean is read by the name of ``MEAN``.
    summed: ir.Operation | None = None

    def copy(self) -> Body:
        """The same, to be written to apart from this one."""
        statements = Statements(list(self.statements.lines), dict(self.statements.names))
        return Body(self.shape, list(self.buffers), list(self.whole), list(self.once), statements, self.summed)

    def take(self, other: Body) -> None:
        """Take over all fields of ``other``, a copy that was written to."""
        self.buffers, self.whole, self.once, self.statements = other.buffers, other.whole, other.once, other.statements


def find_shape(op: ir.Operation) -> tuple[int, ...] | None:
    """The sizes of the loops of a sum down columns; ``None`` of what is none, or too small."""
    if op.name != GENERIC or len(op.results) != 1 or len(op.operands) < 2:
        return None
    reduced = is_reduced(op)
    if len(reduced) < 2 or reduced[-1] or not all(reduced[:-1]):
        return None
    inputs, maps = read_inputs(op), [str(map_) for map_ in read_maps(op)]
    reads, rank = _find_reads(len(reduced)), len(reduced)
    type_ = ir.RankedTensorType(op.results[0].type)
    if not type_.has_static_shape or str(type_.element_type) != "f32" or not _is_last(maps[-1], rank):
        return None
    whole = [value for value, map_ in zip(inputs, maps, strict=False) if map_ == _whole(rank)]
    if not whole or not all(_is_known(value, map_, reads) for value, map_ in zip(inputs, maps, strict=False)):
        return None
    shape = tuple(ir.RankedTensorType(whole[0].type).shape)
    rows = prod(shape[:-1])
    is_large = rows * shape[-1] >= FEWEST and rows >= FEWEST_ROWS and shape[-1] >= FEWEST_COLUMNS
    return shape if is_large else None


def _is_known(value: ir.Value, map_: str, reads: Mapping[str, str]) -> bool:
    if not isinstance(value.type, ir.RankedTensorType):
        return False
    type_ = ir.RankedTensorType(value.type)
    return map_ in reads and type_.has_static_shape and str(type_.element_type) in _ELEMENTS


def _whole(rank: int) -> str:
    return _map(rank, [f"d{axis}" for axis in range(rank)])


def _map(rank: int, results: Sequence[str]) -> str:
    loops = ", ".join(f"d{axis}" for axis in range(rank))
    return f"({loops}) -> ({', '.join(results)})"


def _is_last(map_: str, rank: int) -> bool:
    last = f"d{rank - 1}"
    return map_ in (_map(rank, [last]), _map(rank, ["0"] * (rank - 1) + [last]))


def _find_reads(rank: int) -> dict[str, str]:
    """Where an element lies in a buffer, by the map that it is read by: of each row and column, of a column, of a row,
    of a row's first axis and a column, or one for all."""
    last = f"d{rank - 1}"
    reads = {_whole(rank): "row * columns + column", _map(rank, []): "0"}
    reads |= {_map(rank, ["0"] * count + [last]): "column" for count in range(rank)}
    of_row = [f"d{axis}" for axis in range(rank - 1)]
    reads |= {_map(rank, of_row + more): _OF_ROW for more in ([], ["0"])}
    if rank > 2:
        reads[_map(rank, ["d0", *["0"] * (rank - 2), last])] = "row // plane * columns + column"
        reads[_map(rank, ["d0", last])] = "row // plane * columns + column"
    return reads


def write_sum(op: ir.Operation, body: Body) -> str | None:
    """Write to ``body`` the elements that a sum adds up; returns the name of them."""
    total = op.regions[0].blocks[0].arguments[len(read_inputs(op))]
    combined = find_combined(op, {"arith.addf": 0.0}) if len(list(total.uses)) == 1 else None
    return write_value(combined, body.statements) if combined is not None and _name_inputs(op, body) else None


def _name_inputs(op: ir.Operation, body: Body) -> bool:
    """Have the arguments of an op's body that are its inputs named; whether all can be."""
    arguments, rank = op.regions[0].blocks[0].arguments, len(body.shape)
    reads = _find_reads(rank)
    for value, map_, argument in zip(read_inputs(op), map(str, read_maps(op)), arguments, strict=False):
        if not _is_known(value, map_, reads):
            return False
        inner = _write_inlined(value, body) if map_ == _whole(rank) else None
        name = _add_buffer(value, reads[map_], str(argument.type), body) if inner is None else inner
        body.statements.names[argument] = name
    return True


def _write_inlined(value: ir.Value, body: Body) -> str | None:
    """Write to ``body`` the op that computes a tensor element by element; ``None`` where it is to be read: it is none,
    or is written to memory for others in any case."""
    if value in body.statements.names:
        return body.statements.names[value]
    op = value.owner if isinstance(value, ir.OpResult) else None
    if op is None or not is_elementwise(op) or not read_inputs(op) or _is_kept(op):
        return None
    block = op.regions[0].blocks[0]
    if list(block.arguments[-1].uses):
        return None
    inner = body.copy()
    (*_, end) = (view.operation for view in block.operations)
    if not _name_inputs(op, inner) or (name := write_value(end.operands[0], inner.statements)) is None:
        return None
    inner.statements.names[value] = name
    if _is_far(value, inner, body):
        return None
    body.take(inner)
    return name


def _is_far(value: ir.Value, inner: Body, body: Body) -> bool:
    """Whether a tensor that others than sums read is to be read too, since what it is computed of is much more: along
    the residual stream of a transformer the gradient is a sum over all layers behind."""
    users = [use.owner for use in value.uses]
    added = sum(max(_bits(read), 8) for read in {*inner.whole} - {*body.whole})
    return len(users) > 1 and added > _FARTHEST * _bits(value) and not all(map(_leads_to_sums, users))


def _is_kept(op: ir.Operation) -> bool:
    """Whether a tensor is written to memory in any case: it is computed of several others, and several besides sums
    read it; or it is narrower than what it is computed of, as a product reads it, so that nothing else of what it is
    computed of need be written."""
    whole = _whole(len(is_reduced(op)))
    read = [value for value, map_ in zip(read_inputs(op), read_maps(op), strict=False) if str(map_) == whole]
    others = {use.owner for use in op.results[0].uses if not _leads_to_sums(use.owner)}
    narrowest = min((_bits(value) for value in read), default=0)
    return bool(others) and (_bits(op.results[0]) < narrowest or (len(read) > 1 and len(others) > 1))


def _bits(value: ir.Value) -> int:
    return count_bits(ir.RankedTensorType(value.type).element_type)


def _leads_to_sums(user: ir.Operation | ir.OpView) -> bool:
    """Whether a tensor is read for sums down columns alone."""
    op = user.operation if isinstance(user, ir.OpView) else user
    if find_shape(op) is not None:
        return True
    uses = list(op.results[0].uses) if is_elementwise(op) else []
    return bool(uses) and all(_leads_to_sums(use.owner) for use in uses)


def _add_buffer(value: ir.Value, at: str, element: str, body: Body) -> str:
    """The name of an element of a buffer, loaded once."""
    names = body.statements.names
    key = (value, at)
    if key in names:
        return names[key]
    if body.summed is not None and at == "column" and is_mean(value, body.summed):
        return MEAN
    if value not in body.buffers:
        body.buffers.append(value)
    pointer = f"p{body.buffers.index(value)}"
    truth = " != 0" * (element == "i1")
    if at == _OF_ROW:
        return body.statements.assign(key, f"tl.load({pointer} + row, mask=row < last, other=0){truth}")
    if "row" in at:
        body.whole.append(value)
        return body.statements.assign(key, f"tl.load({pointer} + {at}, mask=inside, other=0){truth}")
    masked = ", mask=wide, other=0" if at == "column" else ""
    names[key] = f"c{len(body.once)}"
    body.once.append(f"{names[key]} = tl.load({pointer} + {at}{masked}){truth}")
    return names[key]


def is_mean(value: ir.Value, summed: ir.Operation) -> bool:
    """Whether a tensor holds the means of the columns that ``summed`` adds up, in whichever shape."""
    op = _behind_views(value)
    if op is None or not is_elementwise(op) or len(read_inputs(op)) != 1:
        return False
    source = _behind_views(op.operands[0])
    body = [view.operation for view in op.regions[0].blocks[0].operations]
    if source != summed or len(body) != 2 or body[0].name not in ("arith.divf", "arith.mulf"):
        return False
    first, second = body[0].operands
    number = read_number(second)
    if first != op.regions[0].blocks[0].arguments[0] or not isinstance(number, ir.FloatAttr):
        return False
    rows = prod(ir.RankedTensorType(read_inputs(summed)[0].type).shape) // prod(ir.RankedTensorType(value.type).shape)
    return bool(number.value == rows) if body[0].name == "arith.divf" else abs(number.value * rows - 1) < _ROUNDING


def _behind_views(value: ir.Value) -> ir.Operation | None:
    """The op that gives a tensor, whichever shape it has got since."""
    while isinstance(value, ir.OpResult) and value.owner.name in (*RESHAPES, "hal.tensor.alias"):
        value = value.owner.operands[0]
    return value.owner if isinstance(value, ir.OpResult) else None
