# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Norms and softmaxes along rows, forward and backward, as one kernel each.

iree-compile makes a kernel of each sum along rows, and one or two of what is computed of them: of a layer norm's
forward five, which read and write the rows as often, and of its backward seven with the sums down columns that its
parameters and a bias before it want. Here a kernel holds a row in registers: it reads each tensor once and writes what
others read. Where columns are added up too, a workgroup takes many rows, and a second kernel adds up the workgroups'
sums, always in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from retrograd.contract.trials import Buffer
from retrograd.dialects import ir
from retrograd.pipelines.kernels.column_text import Tiles
from retrograd.pipelines.kernels.column_text import write_kernel as write_sums
from retrograd.pipelines.kernels.dispatch import create_dispatches
from retrograd.pipelines.kernels.family import Compiled, Refusal
from retrograd.pipelines.kernels.kernel import Kernel
from retrograd.pipelines.kernels.matrices import find_buffer, is_aligned
from retrograd.pipelines.kernels.norm_groups import Finder, Group, Placed
from retrograd.pipelines.kernels.norm_text import NormTile, list_tiles, write_kernel
from retrograd.pipelines.kernels.questions import MEASURED, Chosen, Launch, Question, Run, Trial, pick
from retrograd.pipelines.kernels.row_ops import find_space

# Of the kernel that adds up what workgroups found, of a few columns each so that there are many.
_LAST = Tiles(128, 8, 4, 1, 0)
REPLACED = "bwd.replaced"
"""The attribute of a view whose place another one has taken: nobody reads it."""


@dataclass
class Norms:
    """The family: sums and maxima along rows of fixed sizes, with what is computed around them."""

    architecture: str
    chosen: Chosen = field(default_factory=dict)
    finder: Finder | None = None
    replaced: dict[ir.Value, ir.Value] = field(default_factory=dict)

    name: ClassVar[str] = "norms"

    def plan(self, op: ir.Operation) -> NormPlan | Refusal | None:
        """A plan for the group of ops that a sum or maximum along rows is the first of."""
        if find_space(op) is None:
            return None
        if self.finder is None:
            self.finder = Finder.of(op.block)
        group = self.finder.find(op)
        if group is None:
            return None
        plan = NormPlan(group, self.finder.mark(group), self.replaced)
        tile = pick(plan.question, plan.listed(), self.chosen)
        # Written now: when plans are applied, ops read what others have been replaced by.
        return replace(plan, launched=plan.launches(tile), is_measured=plan.question in self.chosen)


@dataclass(frozen=True)
class NormPlan:
    """A group as one dispatch, or two where columns are added up; ``marker`` is where they are to be."""

    group: Group
    marker: ir.Operation
    replaced: dict[ir.Value, ir.Value] = field(compare=False)
    launched: Sequence[Launch] = ()
    is_measured: bool = False

    def __str__(self) -> str:
        space = self.group.space
        what = f"{len(self.group.kinds)} ops along {space.rows} rows of {space.columns}"
        return f"{what}: {self.launched[0].kernel.label}{MEASURED * self.is_measured}"

    def kernels(self) -> dict[Kernel, bool]:
        """The kernels that it takes."""
        return {launch.kernel: False for launch in self.launched}

    @property
    def question(self) -> str:
        """The text that tiles are asked for by: rows, columns, and the text of what is computed of them."""
        space = self.group.space
        return f"norms {space.rows}x{space.columns} {self._first(NormTile(1, 1, 1)).label}"

    def questions(self) -> list[Question]:
        """The tiles of the first kernel."""
        return [Question(self.question, {str(tile): self._trial(tile) for tile in self.listed()})]

    @property
    def sums(self) -> list[Placed]:
        """The sums down columns."""
        return [op for op in self.group.given if self.group.kinds[op] == "down"]

    def listed(self) -> tuple[NormTile, ...]:
        """The tiles that the first kernel could have."""
        return list_tiles(self.group.space.rows, self.group.space.columns, adds_up=bool(self.sums))

    def launches(self, tile: NormTile) -> list[Launch]:
        """The rows, and the sums of all workgroups' columns if there are any."""
        space = self.group.space
        parts = -(-space.rows // tile.span)
        launches = [Launch(self._first(tile), (parts, 1, 1), (space.rows, space.columns, tile.span))]
        if self.sums:
            grid = (-(-space.columns // _LAST.columns), 1, 1)
            launches.append(Launch(self._second(len(self.sums)), grid, (parts, space.columns, parts, 1)))
        return launches

    def _trial(self, tile: NormTile) -> Trial:
        """The rows by themselves."""
        inputs = tuple(map(find_buffer, self.group.inputs))
        first, *last = self.launches(tile)
        part = Buffer("f32", (first.grid[0], self.group.space.columns))
        given = tuple(part if op in self.sums else find_buffer(op.op.results[0]) for op in self.group.given)
        runs = [Run(first, tuple(range(len(inputs))), given)]
        taken = tuple(len(inputs) + n for n, op in enumerate(self.group.given) if op in self.sums)
        runs += [Run(launch, taken, tuple(find_buffer(op.op.results[0]) for op in self.sums)) for launch in last]
        return Trial(inputs, tuple(runs))

    def apply(self, compiled: Compiled) -> None:
        """Put the dispatches where the marker is, and the views of what they give behind them."""
        first, *last = self.launched
        part = ir.RankedTensorType.get(
            [first.grid[0], self.group.space.columns], ir.F32Type.get(), loc=self.marker.location
        )
        types = [part if op in self.sums else op.op.results[0].type for op in self.group.given]
        operands = [self.replaced.get(value, value) for value in self.group.inputs]
        values = create_dispatches(first, compiled[first.kernel], operands, types, self.marker)
        by_op = dict(zip(self.group.given, values, strict=True))
        for launch in last:
            parts, given = [by_op[op] for op in self.sums], [op.op.results[0].type for op in self.sums]
            summed = create_dispatches(launch, compiled[launch.kernel], parts, given, self.marker)
            by_op |= dict(zip(self.sums, summed, strict=True))
        for op, value in by_op.items():
            self._replace(op.op, value)
        for view in (placed.op for placed in self.group.computed("view")):
            # What it is of may be read in the group alone.
            if view.operands[0] in self.replaced.values():
                self._replace(view, view.clone(ip=ir.InsertionPoint(self.marker)).operation.results[0])
                view.attributes[REPLACED] = ir.UnitAttr.get()

    def _replace(self, op: ir.Operation, value: ir.Value) -> None:
        """Have all that reads an op read a value. The op stays, for nobody: what was planned of it, and is not applied
        yet, may name its values."""
        op.results[0].replace_all_uses_with(value)
        self.replaced[op.results[0]] = value

    def _first(self, tile: NormTile) -> Kernel:
        values = [*self.group.inputs, *(op.op.results[0] for op in self.group.given)]
        names = [f"p{n}" for n in range(len(self.group.inputs))] + [f"r{n}" for n in range(len(self.group.given))]
        own = {op.op.results[0] for op in self.sums}
        aligned = [n for n, value in zip(names, values, strict=True) if value in own or is_aligned(value)]
        return write_kernel(self.group, tile, aligned)

    def _second(self, count: int) -> Kernel:
        names = [f"p{n}" for n in range(count)] + [
            f"r{n}" for n, op in enumerate(self.sums) if is_aligned(op.op.results[0])
        ]
        even = " ".join([*names, *["columns"] * (self.group.space.columns % 16 == 0)])
        lines = [f"v{n} = tl.load(p{n} + row * columns + column, mask=inside, other=0)" for n in range(count)]
        return write_sums(["f32"] * count, [], lines, [f"v{n}" for n in range(count)], _LAST, even)
