# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rows added up where they go, the gradient of an embedding, by kernels of our own: twice the same bits.

The places are ranked, each against each other one, and the rows of one place added up in their order by one program.
Of 8192 tokens and rows of 768 numbers that takes 80 us on an H100, beside the zeros that they are added to. IREE would
compare places with one another once for each number of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from retrograd.contract.trials import Buffer
from retrograd.dialects import ir
from retrograd.pipelines.kernels.dispatch import create_dispatch
from retrograd.pipelines.kernels.family import Compiled, Refusal
from retrograd.pipelines.kernels.kernel import Kernel
from retrograd.pipelines.kernels.matrices import find_buffer
from retrograd.pipelines.kernels.questions import Chosen, Launch, Question, Run, Trial
from retrograd.pipelines.transforms.helpers.scatters import PLACES, SCATTER, TENSOR, UNIQUE, UPDATES

_MAP = "dimension_map"
# Ranking is quadratic: 3 ms for as many.
MOST = 1 << 16
_WIDTH, _ROWS, _RANKED, _AGAINST = 256, 16, 64, 1024

RANK = Kernel(
    "rank_places",
    "scatters",
    "rank",
    (("rows", "i64"), ("order", "i32")),
    ("count",),
    (),
    (("BI", _RANKED), ("BJ", _AGAINST)),
    8,
    1,
)
SEGMENTS = Kernel(
    "add_rows",
    "scatters",
    "segments",
    (("order", "i32"), ("rows", "i64"), ("updates", "f32"), ("table", "f32")),
    ("count", "width"),
    (),
    (("BW", _WIDTH), ("BR", _ROWS)),
    4,
    1,
)


@dataclass(frozen=True)
class Scatters:
    """The family: f32 rows of fixed sizes, added to rows of a table that 64-bit integers name."""

    architecture: str
    chosen: Chosen = field(default_factory=dict)

    name: ClassVar[str] = "scatters"

    def plan(self, op: ir.Operation) -> ScatterPlan | Refusal | None:
        """A plan for a scatter that adds up; the reason where IREE computes it."""
        if op.name != SCATTER or not _adds(op):
            return None
        updates, places, table = (ir.RankedTensorType(operand.type) for operand in op.operands)
        what = f"scatter of {updates} into {table}"
        if not all(type_.has_static_shape for type_ in (updates, places, table)):
            return Refusal(what, "sizes are open")
        if {str(updates.element_type), str(table.element_type)} != {"f32"} or str(places.element_type) != "i64":
            return Refusal(what, "it is not of f32 at places of 64 bits")
        width = math.prod(table.shape[1:])
        axes = list(ir.DenseI64ArrayAttr(op.attributes[_MAP]))
        if axes != [0] or list(places.shape) != [updates.shape[0], 1] or math.prod(updates.shape[1:]) != width:
            return Refusal(what, "it adds to other parts of the table than rows")
        if not 1 < updates.shape[0] <= MOST:
            return Refusal(what, f"there are {updates.shape[0]} rows, and kernels are for 2 to {MOST}")
        return ScatterPlan(op, what, updates.shape[0], width)


def _adds(scatter: ir.Operation) -> bool:
    """Whether a scatter adds its updates to what is there, and two of them may be for one place."""
    if len(scatter.operands) != 3 or ir.BoolAttr(scatter.attributes[UNIQUE]).value:
        return False
    (block,) = scatter.regions[0].blocks
    body = [view.operation for view in block.operations]
    return (
        len(body) == 2
        and body[0].name == "arith.addf"
        and set(body[0].operands) == set(block.arguments)
        and body[1].operands[0] == body[0].results[0]
    )


@dataclass(frozen=True)
class ScatterPlan:
    """A scatter as two dispatches: the order of its places, and the sums."""

    op: ir.Operation
    what: str
    count: int
    width: int

    def __str__(self) -> str:
        return f"{self.what}: {RANK.label}, {SEGMENTS.label}"

    def kernels(self) -> dict[Kernel, bool]:
        """The kernels that it takes."""
        return {RANK: False, SEGMENTS: True}

    def questions(self) -> list[Question]:
        """One choice of tiles: what to run, and nothing to measure."""
        updates, places, table = (find_buffer(operand) for operand in self.op.operands)
        places, (ranks, sums) = replace(places, below=table.shape[0]), self._launches()
        runs = (Run(ranks, (0,), (Buffer("i32", (self.count,)),)), Run(sums, (3, 0, 1, 2), ()))
        text = f"scatters {self.count} of {self.width} into {table.shape[0]}"
        return [Question(text, {"the only": Trial((places, updates, table), runs)})]

    def _launches(self) -> tuple[Launch, Launch]:
        """The order of the places, and the sums."""
        grid = (self.count, -(-self.width // _WIDTH), 1)
        ranks = Launch(RANK, (-(-self.count // _RANKED), 1, 1), (self.count,))
        return ranks, Launch(SEGMENTS, grid, (self.count, self.width), written=3)

    def apply(self, compiled: Compiled) -> None:
        """Put the dispatches in the place of the scatter."""
        op, (ranks, sums) = self.op, self._launches()
        order = ir.RankedTensorType.get([self.count], ir.IntegerType.get_signless(32), loc=op.location)
        ranked = create_dispatch(ranks, compiled[RANK], [op.operands[PLACES]], order, op)
        operands = [ranked, op.operands[PLACES], op.operands[UPDATES], op.operands[TENSOR]]
        value = create_dispatch(sums, compiled[SEGMENTS], operands, op.results[0].type, op)
        op.results[0].replace_all_uses_with(value)
        op.erase()
