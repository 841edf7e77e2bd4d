# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rows added up where they go, the gradient of an embedding, by kernels of our own: twice the same bits.

The places are put in order, and the rows of one place added up in their order by one program. Up to some thousands are
ranked, each against each other one: of 8192 tokens and rows of 768 numbers that takes 80 us on an H100, beside the
zeros that they are added to. More are sorted by eight bits at a time. Of places that many rows go to (a token that
fills up sentences, the few rows of a table of relative positions) parts are added up by a program each. IREE would
compare places with one another once for each number of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from retrograd.contract.trials import Buffer
from retrograd.dialects import ir
from retrograd.pipelines.kernels.dispatch import create_dispatches
from retrograd.pipelines.kernels.family import Compiled, Refusal
from retrograd.pipelines.kernels.kernel import Kernel
from retrograd.pipelines.kernels.matrices import find_buffer
from retrograd.pipelines.kernels.questions import Chosen, Launch, Question, Run, Trial
from retrograd.pipelines.transforms.helpers.fills import PLACES, SCATTER, TENSOR, UNIQUE, UPDATES

_MAP = "dimension_map"
# Ranking is quadratic: 3 ms for 65,536, where sorting takes three launches for eight bits.
MOST_RANKED = 1 << 13
MOST = 1 << 28
# Tiles of numbers that are compared are small: those of 1024 x 64 do not fit into the registers of eight warps.
_RANKED, _AGAINST = 32, 256
# Places sorted by a program, those that it compares at a time, sums in a step, and bits of a digit.
_BLOCK, _COMPARED, _SUMMED, _BITS = 512, 16, 1024, 8
# Numbers of a row and rows that a program adds at a time, and rows of a part.
_WIDEST, _NARROWEST, _ROWS, _CHUNK = 256, 16, 16, 512
# Another launch costs more than it gains for no more than these.
_FEW_CHUNKS = 2
# The number of the first buffer that a launch gives, behind the operands.
_FIRST_GIVEN = 3

RANK = Kernel(
    "rank_places",
    "scatters",
    "rank",
    (("rows", "i64"), ("order", "i32")),
    ("count",),
    (),
    (("BI", _RANKED), ("BJ", _AGAINST)),
    4,
    1,
)
SUM_BEFORE = Kernel(
    "sum_tallies",
    "scatters",
    "sum_before",
    (("counts", "i32"), ("offsets", "i32")),
    ("blocks",),
    (),
    (("BS", _SUMMED),),
    4,
    1,
)


def write_tally(is_first: bool) -> Kernel:
    """The kernel that counts digits; of the first digit there is no order yet."""
    return Kernel(
        "tally_places" + "_first" * is_first,
        "scatters",
        "tally",
        (("rows", "i64"), *_order(is_first), ("counts", "i32")),
        ("count", "shift", "blocks"),
        (),
        (*_no_order(is_first), ("FIRST", int(is_first)), ("BI", _BLOCK)),
        4,
        1,
    )


def write_place(is_first: bool) -> Kernel:
    """The kernel that sorts by a digit."""
    return Kernel(
        "sort_places" + "_first" * is_first,
        "scatters",
        "place",
        (("rows", "i64"), *_order(is_first), ("offsets", "i32"), ("placed", "i32")),
        ("count", "shift", "blocks"),
        (),
        (*_no_order(is_first), ("FIRST", int(is_first)), ("BI", _BLOCK), ("BJ", _COMPARED)),
        16,
        1,
    )


def _order(is_first: bool) -> tuple[tuple[str, str], ...]:
    return () if is_first else (("order", "i32"),)


def _no_order(is_first: bool) -> tuple[tuple[str, None], ...]:
    return (("order", None),) if is_first else ()


def write_parts(width: int) -> Kernel:
    """The kernel that adds up parts of rows of ``width`` numbers."""
    columns = _count_columns(width)
    return Kernel(
        f"add_parts_{columns}",
        "scatters",
        "parts",
        (("order", "i32"), ("rows", "i64"), ("updates", "f32"), ("sums", "f32")),
        ("count", "width"),
        (),
        (("CHUNK", _CHUNK), ("BW", columns), ("BR", _ROWS)),
        4,
        1,
    )


def write_segments(width: int, has_parts: bool) -> Kernel:
    """The kernel that adds rows of ``width`` numbers up, or the parts of them."""
    columns = _count_columns(width)
    parts = (("sums", "f32"),) if has_parts else ()
    constants: tuple[tuple[str, int | None], ...] = (("BW", columns), ("BR", _ROWS))
    return Kernel(
        f"add_rows_{columns}" + "_of_parts" * has_parts,
        "scatters",
        "segments",
        (("order", "i32"), ("rows", "i64"), ("updates", "f32"), *parts, ("table", "f32")),
        ("count", "width"),
        (),
        (*(() if has_parts else (("sums", None),)), ("CHUNK", _CHUNK * has_parts), *constants),
        4,
        1,
    )


def _count_columns(width: int) -> int:
    """Numbers of a row that a program adds, a power of 2."""
    return min(_WIDEST, max(_NARROWEST, 1 << (width - 1).bit_length()))


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
    """A scatter as dispatches: the order of its places, parts of the sums where there are many, and the sums."""

    op: ir.Operation
    what: str
    count: int
    width: int

    def __str__(self) -> str:
        return f"{self.what}: {', '.join(kernel.label for kernel in self.kernels())}"

    def kernels(self) -> dict[Kernel, bool]:
        """The kernels that it takes."""
        return {run.launch.kernel: run.launch.written is not None for run in self.runs()}

    def questions(self) -> list[Question]:
        """One choice of tiles: what to run, and nothing to measure."""
        buffers = {place: find_buffer(self.op.operands[place]) for place in (PLACES, UPDATES, TENSOR)}
        buffers[PLACES] = replace(buffers[PLACES], below=self._count_rows())
        text = f"scatters {self.count} of {self.width} into {self._count_rows()}"
        return [Question(text, {"the only": Trial(tuple(buffers.values()), tuple(self.runs()))})]

    def runs(self) -> list[Run]:
        """The launches: of buffers 0 is the places, 1 the updates and 2 the table; each but the last gives one more."""
        found: list[Run] = []
        if self.count <= MOST_RANKED:
            order = Buffer("i32", (self.count,))
            found.append(Run(Launch(RANK, (-(-self.count // _RANKED), 1, 1), (self.count,)), (0,), (order,)))
        else:
            for shift in range(0, max(1, (self._count_rows() - 1).bit_length()), _BITS):
                found += self._sort(shift, _FIRST_GIVEN + len(found))
        ordered = _FIRST_GIVEN + len(found) - 1
        tiles = -(-self.width // _count_columns(self.width))
        chunks = -(-self.count // _CHUNK)
        sizes = (self.count, self.width)
        has_parts = chunks > _FEW_CHUNKS
        if has_parts:
            launch = Launch(write_parts(self.width), (chunks, tiles, 1), sizes)
            found.append(Run(launch, (ordered, 0, 1), (Buffer("f32", (chunks, self.width)),)))
        kernel = write_segments(self.width, has_parts)
        taken = (ordered, 0, 1, *[ordered + 1] * has_parts, 2)
        found.append(Run(Launch(kernel, (self.count, tiles, 1), sizes, written=len(taken) - 1), taken, ()))
        return found

    def _sort(self, shift: int, given: int) -> list[Run]:
        """Sort by the digit at ``shift``; buffers from number ``given`` on are its own, the one before an order."""
        is_first, blocks = shift == 0, -(-self.count // _BLOCK)
        numbers, grid = (self.count, shift, blocks), (blocks, 1, 1)
        order = () if is_first else (given - 1,)
        counts = Buffer("i32", ((1 << _BITS) * blocks,))
        return [
            Run(Launch(write_tally(is_first), grid, numbers), (0, *order), (counts,)),
            Run(Launch(SUM_BEFORE, (1 << _BITS, 1, 1), (blocks,)), (given,), (counts,)),
            Run(Launch(write_place(is_first), grid, numbers), (0, *order, given + 1), (Buffer("i32", (self.count,)),)),
        ]

    def _count_rows(self) -> int:
        return int(ir.RankedTensorType(self.op.operands[TENSOR].type).shape[0])

    def apply(self, compiled: Compiled) -> None:
        """Put the dispatches in the place of the scatter."""
        op = self.op
        values = [op.operands[place] for place in (PLACES, UPDATES, TENSOR)]
        for run in self.runs():
            types = [_type_of(buffer, op.location) for buffer in run.given] or [op.results[0].type]
            taken = [values[number] for number in run.taken]
            values += create_dispatches(run.launch, compiled[run.launch.kernel], taken, types, op)
        op.results[0].replace_all_uses_with(values[-1])
        op.erase()


def _type_of(buffer: Buffer, location: ir.Location) -> ir.Type:
    """The type of a tensor that a kernel gives."""
    return ir.RankedTensorType.get(list(buffer.shape), ir.Type.parse(buffer.element), loc=location)
