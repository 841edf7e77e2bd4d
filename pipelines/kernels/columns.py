# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sums down columns, such as a batch norm's over images with channels last or the gradient of a bias, in one pass.

A kernel is written for each group of sums over the same rows: it reads each tensor once for all of them, with all in it
that is computed element by element before. Rows are divided among workgroups, each of which adds up a part of them, and
a second kernel adds up the parts, always in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

from retrograd.contract.trials import Buffer
from retrograd.dialects import ir
from retrograd.pipelines.kernels.column_text import (
    LAST,
    MEAN,
    Tiles,
    list_tiles,
    write_kernel,
    write_merge,
    write_moments,
)
from retrograd.pipelines.kernels.dispatch import create_dispatches
from retrograd.pipelines.kernels.expressions import TYPES, Statements, find_combined, write_value
from retrograd.pipelines.kernels.family import Compiled, Refusal
from retrograd.pipelines.kernels.kernel import Kernel
from retrograd.pipelines.kernels.matrices import find_buffer, is_aligned
from retrograd.pipelines.kernels.questions import MEASURED, MOST, Chosen, Launch, Question, Run, Trial, pick
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
# Offsets are of 32 bits.
_MOST = 1 << 31
_MOST_BUFFERS, _MOST_SUMS = 12, 4
# What is computed of more than so many times its size is read, where others read it too.
_FARTHEST = 2
_ELEMENTS = (*TYPES, "i1")
_RESHAPES = ("tensor.expand_shape", "tensor.collapse_shape")
_MOVABLE = (GENERIC, *_RESHAPES, "tensor.empty", "linalg.fill", "arith.constant")

# Of a number in f32, times its inverse.
_ROUNDING = 1e-6
# Where a number of each row lies.
_OF_ROW = "row"


@dataclass
class _Body:
    """The buffers that a kernel reads, those of rows among them, what it reads once for all rows, and what it computes
    of each element."""

    shape: tuple[int, ...]
    buffers: list[ir.Value] = field(default_factory=list)
    whole: list[ir.Value] = field(default_factory=list)
    once: list[str] = field(default_factory=list)
    statements: Statements = field(default_factory=Statements)
    # The sum whose mean is read by the name of ``MEAN``.
    summed: ir.Operation | None = None

    def copy(self) -> _Body:
        """The same, to be written to apart from this one."""
        statements = Statements(list(self.statements.lines), dict(self.statements.names))
        return _Body(self.shape, list(self.buffers), list(self.whole), list(self.once), statements, self.summed)

    def take(self, other: _Body) -> None:
        """Take over all fields of ``other``, a copy that was written to."""
        self.buffers, self.whole, self.once, self.statements = other.buffers, other.whole, other.once, other.statements


@dataclass(frozen=True)
class Columns:
    """The family: sums of f32 over all loops but the innermost, of fixed sizes, and what is computed before them."""

    architecture: str
    chosen: Chosen = field(default_factory=dict)
    grouped: set[ir.Value] = field(default_factory=set, compare=False)
    places: dict[ir.Value, int] = field(default_factory=dict, compare=False)
    replaced: dict[ir.Value, ir.Value] = field(default_factory=dict, compare=False)

    name: ClassVar[str] = "columns"

    def plan(self, op: ir.Operation) -> ColumnPlan | Refusal | None:
        """A plan for a sum and those after it that read the same; nothing for a sum that is part of another's plan."""
        shape = find_shape(op)
        if shape is None or op.results[0] in self.grouped:
            return None
        rows = prod(shape[:-1])
        what = f"sum of {rows} rows of {shape[-1]}"
        if rows * shape[-1] >= _MOST:
            return Refusal(what, "offsets are of 32 bits")
        body = _Body(shape)
        value = _write_sum(op, body)
        if value is None or len(body.buffers) > _MOST_BUFFERS:
            return Refusal(what, "it computes what kernels are not written for")
        value_of_first = value
        sums, moved = {op: value}, list[ir.Operation]()
        for other in self._find_others(op, shape):
            alone, joint = _Body(shape), body.copy()
            if _write_sum(other, alone) is None or not set(alone.whole) & set(body.whole):
                continue
            value = _write_sum(other, joint)
            if value is None or len(joint.buffers) > _MOST_BUFFERS:
                continue
            needed = self._find_needed(joint.buffers, op)
            if needed is None:
                continue
            body, moved = joint, needed
            sums[other] = value
            if len(sums) == _MOST_SUMS:
                break
        squares = self._find_squares(op, body, value_of_first) if len(sums) == 1 else None
        self.grouped.update(sum_.results[0] for sum_ in (*sums, *([squares] if squares else [])))
        if squares is not None:
            what += ", and of the squares of their distances from the mean"
        return ColumnPlan(
            what, tuple(sums), tuple(sums.values()), body, tuple(moved), self.replaced, self.chosen, squares
        )

    def _find_squares(self, op: ir.Operation, body: _Body, value: str) -> ir.Operation | None:
        """The sum of the squares of what ``op`` adds up, less its mean."""
        for other in self._find_others(op, body.shape):
            joint = body.copy()
            joint.summed = op
            found = _write_sum(other, joint)
            if found is None or joint.buffers != body.buffers:
                continue
            root, star, same = joint.statements.expression_of(found).strip("()").partition(" * ")
            if star and root == same and joint.statements.expression_of(root) == f"({value} - {MEAN})":
                return other
        return None

    def _find_others(self, op: ir.Operation, shape: tuple[int, ...]) -> Iterator[ir.Operation]:
        """Sums after ``op`` in its block that go over as many rows."""
        is_after = False
        for view in op.block.operations:
            other = view.operation
            if is_after and find_shape(other) == shape and other.results[0] not in self.grouped:
                yield other
            is_after |= other == op

    def _find_needed(self, buffers: Sequence[ir.Value], op: ir.Operation) -> list[ir.Operation] | None:
        """Finds the ops behind ``op`` that give buffers, in order: to be moved in front of it; ``None`` where something
        of it cannot be."""
        if not self.places:
            for place, view in enumerate(op.block.operations):
                self.places.update(dict.fromkeys(view.operation.results, place))
        first = self.places[op.results[0]]
        found: dict[int, ir.Operation] = {}
        waiting = list(buffers)
        while waiting:
            value = waiting.pop()
            place = self.places.get(value, -1)
            if place < first or place in found:
                continue
            source = value.owner
            if source == op or source.name not in _MOVABLE or find_shape(source) is not None:
                return None
            found[place] = source
            waiting += source.operands
        return [found[place] for place in sorted(found)]


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


def _write_sum(op: ir.Operation, body: _Body) -> str | None:
    """Write to ``body`` the elements that a sum adds up; returns the name of them."""
    total = op.regions[0].blocks[0].arguments[len(read_inputs(op))]
    combined = find_combined(op, {"arith.addf": 0.0}) if len(list(total.uses)) == 1 else None
    return write_value(combined, body.statements) if combined is not None and _name_inputs(op, body) else None


def _name_inputs(op: ir.Operation, body: _Body) -> bool:
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


def _write_inlined(value: ir.Value, body: _Body) -> str | None:
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


def _is_far(value: ir.Value, inner: _Body, body: _Body) -> bool:
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


def _add_buffer(value: ir.Value, at: str, element: str, body: _Body) -> str:
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
    while isinstance(value, ir.OpResult) and value.owner.name in (*_RESHAPES, "hal.tensor.alias"):
        value = value.owner.operands[0]
    return value.owner if isinstance(value, ir.OpResult) else None


@dataclass(frozen=True)
class ColumnPlan:
    """Sums over the same rows as one dispatch, or two where rows are divided; ``moved`` is what stands behind the first
    of them and gives what they read."""

    what: str
    sums: tuple[ir.Operation, ...]
    values: tuple[str, ...]
    body: _Body
    moved: tuple[ir.Operation, ...]
    replaced: dict[ir.Value, ir.Value] = field(compare=False)
    chosen: Chosen
    squares: ir.Operation | None = None

    @property
    def results(self) -> tuple[ir.Operation, ...]:
        """The ops whose results the kernels give."""
        return (*self.sums, *([self.squares] if self.squares is not None else []))

    def __str__(self) -> str:
        count = len(self.sums)
        return f"{f'{count} times ' if count > 1 else ''}{self.what}: {self._first(self.tiles).label}" + (
            MEASURED * (self.question in self.chosen)
        )

    def kernels(self) -> dict[Kernel, bool]:
        """The kernels that it takes."""
        return {launch.kernel: False for launch in self.launches(self.tiles)}

    @property
    def question(self) -> str:
        """The text that tiles are asked for by: rows, columns, and the text of what is computed of them."""
        *leading, columns = self.body.shape
        # The text for any tiles.
        text = self._first(Tiles(1, 1, 1, 1, 1)).label
        return f"columns {prod(leading)}x{columns} {len(set(self.body.whole))} tensors {text}"

    def questions(self) -> list[Question]:
        """The tiles of the first kernel."""
        return [Question(self.question, {str(tiles): self._trial(tiles) for tiles in self._listed()})]

    def _trial(self, tiles: Tiles) -> Trial:
        """The sums by themselves."""
        inputs, columns, runs = [find_buffer(value) for value in self.body.buffers], self.body.shape[-1], list[Run]()
        taken = tuple(range(len(inputs)))
        *inner, last = self.launches(tiles)
        for launch in inner:
            runs.append(Run(launch, taken, (Buffer("f32", (tiles.parts, columns)),) * len(self.results)))
            taken = tuple(range(len(inputs), len(inputs) + len(self.results)))
        runs.append(Run(last, taken, (Buffer("f32", (columns,)),) * len(self.results)))
        return Trial(tuple(inputs), tuple(runs))

    def launches(self, tiles: Tiles) -> list[Launch]:
        """The sums of each part of the rows, and those of all parts if there are several."""
        *leading, columns = self.body.shape
        rows = prod(leading)
        grid = (-(-columns // tiles.columns), tiles.parts, 1)
        first = Launch(self._first(tiles), grid, (rows, columns, tiles.span, prod(leading[1:])))
        if tiles.parts == 1:
            return [first]
        grid = (-(-columns // LAST.columns), 1, 1)
        spans = (tiles.span, rows) if self.squares is not None else (tiles.parts, 1)
        return [first, Launch(self._second(), grid, (tiles.parts, columns, *spans))]

    def apply(self, compiled: Compiled) -> None:
        """Put the dispatches in the place of the first sum."""
        before, ops = self.sums[0], self.results
        for op in self.moved:
            op.move_before(before)
        values = [self.replaced.get(buffer, buffer) for buffer in self.body.buffers]
        tiles = self.tiles
        part = [tiles.parts, self.body.shape[-1]]
        parts = [ir.RankedTensorType.get(part, ir.F32Type.get(), loc=before.location)] * len(ops)
        *inner, last = self.launches(tiles)
        for launch in inner:
            values = create_dispatches(launch, compiled[launch.kernel], values, parts, before)
        given = [op.results[0].type for op in ops]
        values = create_dispatches(last, compiled[last.kernel], values, given, before)
        for op, value in zip(ops, values, strict=True):
            op.results[0].replace_all_uses_with(value)
            # Plans that are not applied yet name the values that they read.
            self.replaced[op.results[0]] = value

    @property
    def tiles(self) -> Tiles:
        """The tiles of the first kernel."""
        return pick(self.question, self._listed(), self.chosen)

    def _listed(self) -> tuple[Tiles, ...]:
        rows, columns = prod(self.body.shape[:-1]), self.body.shape[-1]
        return list_tiles(rows, columns, len(set(self.body.whole)), MOST)

    def _even(self, buffers: Sequence[str]) -> str:
        results = [f"r{number}" for number in range(len(self.results))]
        return " ".join([*buffers, *results, *["columns"] * (self.body.shape[-1] % 16 == 0)])

    def _first(self, tiles: Tiles) -> Kernel:
        body = self.body
        elements = [str(ir.RankedTensorType(buffer.type).element_type) for buffer in body.buffers]
        even = self._even([f"p{n}" for n, buffer in enumerate(body.buffers) if is_aligned(buffer)])
        if self.squares is not None:
            return write_moments(elements, body.once, body.statements.lines, self.values[0], tiles, even)
        return write_kernel(elements, body.once, body.statements.lines, self.values, tiles, even)

    def _second(self) -> Kernel:
        count = len(self.results)
        even = self._even([f"p{number}" for number in range(count)])
        if self.squares is not None:
            return write_merge(even)
        values = [f"v{number}" for number in range(count)]
        lines = [f"v{n} = tl.load(p{n} + row * columns + column, mask=inside, other=0)" for n in range(count)]
        return write_kernel(["f32"] * count, [], lines, values, LAST, even)
