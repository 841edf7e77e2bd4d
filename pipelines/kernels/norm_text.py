# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels of what is computed along the same rows, as text in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from retrograd.dialects import ir
from retrograd.pipelines.kernels.expressions import TYPES, Statements, write_value
from retrograd.pipelines.kernels.kernel import Kernel
from retrograd.pipelines.kernels.norm_groups import Group, Placed
from retrograd.pipelines.kernels.questions import MOST
from retrograd.pipelines.kernels.row_ops import ALL, COLUMN, ROW, WHOLE, find_place, find_value
from retrograd.pipelines.transforms.helpers.generics import read_inputs

_TEXT = '''"""A kernel that was written for ops along the same rows."""
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def along(BUFFERS, rows, columns, span, BR: tl.constexpr, BC: tl.constexpr):
    column = tl.arange(0, BC)[None, :]
    wide = column < columns
    first = tl.program_id(0) * span
    last = tl.minimum(first + span, rows)
ONCE
    for start in range(first, last, BR):
        row = start + tl.arange(0, BR)[:, None]
        there = row < last
        inside = there & wide
LINES
STORES
'''
_MULTIPROCESSORS = 132
# Elements of a tile, and of a thread; of a kernel that adds up columns too, which waits for memory longer.
_TILE, _EACH = 2048, 16
_MOST_WARPS = 16
# Warps of a multiprocessor: sums down columns stay in registers.
_RESIDENT = 8


@dataclass(frozen=True)
class NormTile:
    """A tile of rows that a number of warps take at a time; ``span`` rows for each workgroup."""

    rows: int
    warps: int
    span: int

    def __str__(self) -> str:
        return f"{self.rows} rows {self.warps} warps {self.span} each"


def list_tiles(rows: int, columns: int, *, adds_up: bool) -> tuple[NormTile, ...]:
    """The tiles that a kernel could have, first those that are taken unasked. Where it ``adds_up`` columns, a workgroup
    takes one tile after another, so that there are few sums to be added up behind it."""
    wide = count_lanes(columns)
    high = max(1, _TILE // wide)
    warps = min(_MOST_WARPS, max(4, high * wide // (32 * _EACH)))
    shapes = [(high, warps), (2 * high, 2 * warps), (2 * high, warps), (high, 2 * warps), (high // 2, warps)]
    if adds_up:
        # Measured on an H100, of 4096 rows of 768 to 3072.
        shapes = [(2 * high, warps if wide <= _TILE // 2 else 2 * warps), *shapes]
    tiles = []
    for tall, many in dict.fromkeys(shapes):
        if tall < 1 or many > _MOST_WARPS:
            continue
        for factor in (1, 2) if adds_up else (1,):
            programs = factor * _MULTIPROCESSORS * max(1, _RESIDENT // many)
            tiles.append(NormTile(tall, many, tall * -(-rows // (programs * tall)) if adds_up else tall))
    return tuple(dict.fromkeys(tiles))[:MOST]


def count_lanes(columns: int) -> int:
    """The power of two that a row fits into."""
    return 1 << (columns - 1).bit_length()


@dataclass
class _Text:
    """The statements of a kernel, those that are computed once apart."""

    group: Group
    once: list[str] = field(default_factory=list)
    statements: Statements = field(default_factory=Statements)
    totals: list[str] = field(default_factory=list)

    def write(self, placed: Placed) -> None:
        """Write the statements of an op of the group."""
        kind, op = self.group.kinds[placed], placed.op
        block = op.regions[0].blocks[0]
        for number, value in enumerate(read_inputs(op)):
            self.statements.names[block.arguments[number]] = self._name(op, number, value)
        value = find_value(op, kind)
        name = None if value is None else write_value(value, self.statements)
        assert name is not None, "the group has ops alone that there are statements for"
        if kind == "along":
            name = self._reduce(op, name)
        elif kind == "down":
            total = f"total{len(self.totals)}"
            self.once.append(f"{total} = tl.zeros((BR, BC), tl.float32)")
            self.statements.lines.append(f"{total} += tl.where(inside, {name}, 0.0)")
            self.totals.append(total)
            name = total
        self.statements.names[op.results[0]] = name

    def _reduce(self, op: ir.Operation, name: str) -> str:
        (*_, end) = (view.operation for view in op.regions[0].blocks[0].operations)
        if end.operands[0].owner.name == "arith.addf":
            return self.statements.assign(op.results[0], f"tl.sum(tl.where(inside, {name}, 0.0), 1, keep_dims=True)")
        filled = self.statements.assign((op.results[0], "filled"), f'tl.where(inside, {name}, float("-inf"))')
        # What combines the threads' maxima leaves out what is no number.
        none = f"tl.sum(({filled} != {filled}).to(tl.int32), 1, keep_dims=True) > 0"
        return self.statements.assign(
            op.results[0], f'tl.where({none}, float("nan"), tl.max({filled}, 1, keep_dims=True))'
        )

    def _name(self, op: ir.Operation, number: int, value: ir.Value) -> str:
        group, names = self.group, self.statements.names
        if group.holds(value):
            return names[group.root(value)]
        place = find_place(op, number, group.space)
        assert place is not None, "the group has what is read by known maps alone"
        if (value, place) in names:
            return names[value, place]
        truth = " != 0" * (str(ir.RankedTensorType(value.type).element_type) == "i1")
        mask = {ALL: "", COLUMN: "wide"}.get(place, "inside" if "column" in place else "there")
        masked = f", mask={mask}, other=0" if mask else ""
        load = f"tl.load(p{group.inputs.index(value)} + {place}{masked}){truth}"
        if place not in (ALL, COLUMN):
            return self.statements.assign((value, place), load)
        names[value, place] = f"c{len(self.once)}"
        self.once.append(f"{names[value, place]} = {load}")
        return names[value, place]


def write_kernel(group: Group, tile: NormTile, aligned: Sequence[str]) -> Kernel:
    """The kernel of a group, with its source; ``aligned`` are the names of buffers that begin at multiples of 16
    bytes. Of sums down columns it gives those of each workgroup."""
    text = _Text(group)
    for op, kind in group.kinds.items():
        if kind != "view":
            text.write(op)
    names, stores = text.statements.names, list[str]()
    for number, op in enumerate(group.given):
        element, value = op.element, names[op.op.results[0]]
        if group.kinds[op] == "down":
            place = "tl.program_id(0) * columns + column"
            stores.append(f"    tl.store(r{number} + {place}, tl.sum({value}, 0, keep_dims=True), mask=wide)")
        elif group.kinds[op] == "map":
            stored = f"tl.store(r{number} + {WHOLE}, ({value}).to({TYPES[element]}), mask=inside)"
            text.statements.lines.append(stored)
        else:
            text.statements.lines.append(f"tl.store(r{number} + {ROW}, ({value}).to({TYPES[element]}), mask=there)")
    results = [f"r{number}" for number in range(len(group.given))]
    buffers = [f"p{number}" for number in range(len(group.inputs))]
    source = _TEXT.replace("BUFFERS", ", ".join([*buffers, *results]))
    source = source.replace("ONCE\n", "".join(f"    {line}\n" for line in text.once))
    source = source.replace("LINES\n", "".join(f"        {line}\n" for line in text.statements.lines))
    source = source.replace("STORES\n", "".join(f"{line}\n" for line in stores))
    types = [str(ir.RankedTensorType(value.type).element_type) for value in group.inputs]
    types += [op.element for op in group.given]
    constants = (("BR", tile.rows), ("BC", count_lanes(group.space.columns)))
    even = (*aligned, *["columns"] * (group.space.columns % 16 == 0))
    digest = sha256(f"{source} {types} {constants} {tile.warps} {even}".encode()).hexdigest()[:8]
    return Kernel(
        label=f"norms_{len(group.given)}_{digest}",
        source="norms",
        function="along",
        pointers=tuple(zip([*buffers, *results], types, strict=True)),
        numbers=("rows", "columns", "span"),
        aligned=even,
        constants=constants,
        warps=tile.warps,
        stages=1,
        text=source,
        results=len(results),
    )
