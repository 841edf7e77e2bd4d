# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sums down columns, such as a batch norm's over images with channels last or the gradient of a bias, in one pass.

A kernel is written for each group of sums over the same rows: it reads each tensor once for all of them, with all in it
that is computed element by element before. Rows are divided among workgroups, each of which adds up a part of them, and
a second kernel adds up the parts, always in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

from retrograd.contract.trials import Buffer
from retrograd.dialects import ir
from retrograd.pipelines.kernels.column_sums import RESHAPES, Body, find_shape, write_sum
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
from retrograd.pipelines.kernels.family import Compiled, Refusal
from retrograd.pipelines.kernels.kernel import Kernel
from retrograd.pipelines.kernels.matrices import find_buffer, is_aligned
from retrograd.pipelines.kernels.questions import MEASURED, MOST, Chosen, Launch, Question, Run, Trial, pick
from retrograd.pipelines.transforms.helpers.generics import GENERIC

# Offsets are of 32 bits.
_MOST = 1 << 31
_MOST_BUFFERS, _MOST_SUMS = 12, 4
_MOVABLE = (GENERIC, *RESHAPES, "tensor.empty", "linalg.fill", "arith.constant")


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
        body = Body(shape)
        value = write_sum(op, body)
        if value is None or len(body.buffers) > _MOST_BUFFERS:
            return Refusal(what, "it computes what kernels are not written for")
        value_of_first = value
        sums, moved = {op: value}, list[ir.Operation]()
        for other in self._find_others(op, shape):
            alone, joint = Body(shape), body.copy()
            if write_sum(other, alone) is None or not set(alone.whole) & set(body.whole):
                continue
            value = write_sum(other, joint)
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

    def _find_squares(self, op: ir.Operation, body: Body, value: str) -> ir.Operation | None:
        """The sum of the squares of what ``op`` adds up, less its mean."""
        for other in self._find_others(op, body.shape):
            joint = body.copy()
            joint.summed = op
            found = write_sum(other, joint)
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


@dataclass(frozen=True)
class ColumnPlan:
    """Sums over the same rows as one dispatch, or two where rows are divided; ``moved`` is what stands behind the first
    of them and gives what they read."""

    what: str
    sums: tuple[ir.Operation, ...]
    values: tuple[str, ...]
    body: Body
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
