# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels of sums down columns, as text in Triton: of sums over the same rows, and of a mean and its squares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from retrograd.pipelines.kernels.kernel import Kernel

MEAN = "mean"
"""The name of the mean of a column so far, in the kernel of its moments."""

_HEAD = '''"""A kernel that was written for sums over the same rows."""
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def down(BUFFERS, rows, columns, span, plane, BR: tl.constexpr, BC: tl.constexpr):
'''
_TEXT = """\
    column = tl.program_id(0) * BC + tl.arange(0, BC)[None, :]
    wide = column < columns
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, rows)
ONCE
    for start in range(first, last, BR):
        row = start + tl.arange(0, BR)[:, None]
        inside = (row < last) & wide
LOADS
    place = tl.program_id(0) * BC + tl.arange(0, BC)
STORES
"""
_MOMENTS = """\
    column = tl.program_id(0) * BC + tl.arange(0, BC)[None, :]
    wide = column < columns
    first = tl.program_id(1) * span
    last = tl.minimum(first + span, rows)
    slot = tl.arange(0, BR)[:, None]
ONCE
    total = tl.zeros((BR, BC), tl.float32)
    mean = tl.zeros((BR, BC), tl.float32)
    square = tl.zeros((BR, BC), tl.float32)
    count = 0.0
    for start in range(first, last, BR):
        row = start + slot
        inside = (row < last) & wide
LOADS
        count += 1.0
        total += tl.where(inside, VALUE, 0.0)
        step = tl.where(inside, VALUE - mean, 0.0)
        mean += step * (1.0 / count)
        square += step * tl.where(inside, VALUE - mean, 0.0)
    each = tl.maximum((last - first - slot + BR - 1) // BR, 0).to(tl.float32)
    off = mean - (tl.sum(mean * each, 0) / (last - first).to(tl.float32))[None, :]
    place = tl.program_id(0) * BC + tl.arange(0, BC)
    tl.store(r0 + tl.program_id(1) * columns + place, tl.sum(total, 0), mask=place < columns)
    spread = tl.sum(square + each * off * off, 0)
    tl.store(r1 + tl.program_id(1) * columns + place, spread, mask=place < columns)
"""
# ``rows`` are parts here, of ``span`` rows each, but for the last: ``plane`` are all rows.
_MERGE = """\
    column = tl.program_id(0) * BC + tl.arange(0, BC)[None, :]
    wide = column < columns
    total = tl.zeros((BR, BC), tl.float32)
    for start in range(0, rows, BR):
        part = start + tl.arange(0, BR)[:, None]
        total += tl.load(p0 + part * columns + column, mask=(part < rows) & wide, other=0)
    sums = tl.sum(total, 0)
    mean = (sums / plane.to(tl.float32))[None, :]
    square = tl.zeros((BR, BC), tl.float32)
    for start in range(0, rows, BR):
        part = start + tl.arange(0, BR)[:, None]
        inside = (part < rows) & wide
        count = tl.minimum(plane - part * span, span).to(tl.float32)
        own = tl.load(p0 + part * columns + column, mask=inside, other=0)
        off = tl.where(inside, own / count - mean, 0.0)
        square += tl.load(p1 + part * columns + column, mask=inside, other=0) + count * off * off
    place = tl.program_id(0) * BC + tl.arange(0, BC)
    tl.store(r0 + place, sums, mask=place < columns)
    tl.store(r1 + place, tl.sum(square, 0), mask=place < columns)
"""


@dataclass(frozen=True)
class Tiles:
    """How columns are divided: tiles of ``rows`` x ``columns`` for each step of a workgroup of so many ``warps``, and
    ``parts`` of all rows, of ``span`` rows each."""

    rows: int
    columns: int
    warps: int
    parts: int
    span: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns} {self.warps} warps {self.parts} parts"


# Of the kernel that adds up the parts, of which there are hundreds.
LAST = Tiles(64, 32, 4, 1, 0)
_MULTIPROCESSORS = 132
_TILE = 4096
_NARROWEST, _WIDEST = 16, 256


def choose_tiles(rows: int, columns: int, tensors: int = 1) -> Tiles:
    """Tiles for sums of columns that so many tensors are read for. Chosen among 54 at nine sizes of a ResNet-50 on an
    H100, where the best of them reach 0.83 to 0.95 of a copy's rate with tensors larger than its cache."""
    wide = 64 if columns >= 256 else min(32, 1 << (columns - 1).bit_length())
    workgroups = (4 if rows * columns >= 1 << 24 else 2) * _MULTIPROCESSORS
    return _divide(rows, columns, (_TILE // wide, wide), 8 if tensors == 1 else 4, workgroups)


def list_tiles(rows: int, columns: int, tensors: int, most: int) -> tuple[Tiles, ...]:
    """List at most ``most`` tiles that a device may find the fastest: first those that are taken unasked, then what is
    like them but for the sizes, the warps or the number of parts."""
    first = choose_tiles(rows, columns, tensors)
    count = first.parts * -(-columns // first.columns)
    size, other = (first.rows, first.columns), 12 - first.warps
    taller, flatter = (2 * size[0], size[1]), (size[0] // 2, size[1])
    wider, narrower = (size[0] // 2, 2 * size[1]), (2 * size[0], size[1] // 2)
    near = [
        (size, other, count),
        (size, first.warps, count // 2),
        (size, first.warps, 2 * count),
        (flatter, first.warps, count),
        (flatter, first.warps, 2 * count),
        (taller, 8, count),
        (wider, first.warps, count),
        (narrower, first.warps, count),
        (wider, other, 2 * count),
        ((size[0] // 4, size[1]), 4, 4 * count),
        ((size[0] // 4, 2 * size[1]), 4, 4 * count),
    ]
    fitting = [
        _divide(rows, columns, tile, warps, workgroups)
        for tile, warps, workgroups in near
        if tile[0] >= 1 and _NARROWEST <= tile[1] <= _WIDEST
    ]
    return tuple(dict.fromkeys([first, *fitting]))[:most]


def _divide(rows: int, columns: int, tile: tuple[int, int], warps: int, workgroups: int) -> Tiles:
    """Tiles for about so many workgroups."""
    high, wide = tile
    across = -(-columns // wide)
    parts = max(1, min(workgroups // across, -(-rows // high)))
    span = high * -(-rows // (parts * high))
    return Tiles(high, wide, warps, -(-rows // span), span)


def write_kernel(
    elements: Sequence[str], once: Sequence[str], lines: Sequence[str], values: Sequence[str], tiles: Tiles, even: str
) -> Kernel:
    """The kernel of sums of ``values``, with its source: of buffers of these ``elements``, statements that are computed
    once, and those of each step. ``even`` are the names of buffers and numbers that are multiples of 16."""
    results = [f"r{number}" for number in range(len(values))]
    buffers = [f"p{number}" for number in range(len(elements))]
    totals = [f"total{number}" for number in range(len(values))]
    start = [f"{total} = tl.zeros((BR, BC), tl.float32)" for total in totals]
    added = [f"{total} += tl.where(inside, {value}, 0.0)" for total, value in zip(totals, values, strict=True)]
    stores = [
        f"tl.store({result} + tl.program_id(1) * columns + place, tl.sum({total}, 0), mask=place < columns)"
        for result, total in zip(results, totals, strict=True)
    ]
    text = _HEAD.replace("BUFFERS", ", ".join([*buffers, *results])) + _TEXT.replace(
        "ONCE", _indented([*once, *start], 4)
    ).replace("LOADS", _indented([*lines, *added], 8)).replace("STORES", _indented(stores, 4))
    return _make_kernel(text, elements, len(values), tiles, even)


def write_moments(
    elements: Sequence[str], once: Sequence[str], lines: Sequence[str], value: str, tiles: Tiles, even: str
) -> Kernel:
    """The kernel of the sum of ``value``, and of its squares less the mean, of each part of the rows: by Welford's
    updates for each row of a tile ("Note on a method for calculating corrected sums of squares and products", 1962),
    which are joined as by Chan, Golub and LeVeque (1983)."""
    buffers = [f"p{number}" for number in range(len(elements))]
    text = _HEAD.replace("BUFFERS", ", ".join([*buffers, "r0", "r1"])) + _MOMENTS.replace(
        "ONCE", _indented(once, 4)
    ).replace("LOADS", _indented(lines, 8)).replace("VALUE", value)
    return _make_kernel(text, elements, 2, tiles, even)


def _make_kernel(text: str, elements: Sequence[str], count: int, tiles: Tiles, even: str) -> Kernel:
    results = [f"r{number}" for number in range(count)]
    buffers = [f"p{number}" for number in range(len(elements))]
    constants = (("BR", tiles.rows), ("BC", tiles.columns))
    digest = sha256(f"{text} {elements} {constants} {tiles.warps} {even}".encode()).hexdigest()[:8]
    return Kernel(
        label=f"columns_{count}_{digest}",
        source="columns",
        function="down",
        pointers=(*zip(buffers, elements, strict=True), *((result, "f32") for result in results)),
        numbers=("rows", "columns", "span", "plane"),
        aligned=tuple(even.split()),
        constants=constants,
        warps=tiles.warps,
        stages=1,
        text=text,
        results=count,
    )


def _indented(lines: Sequence[str], by: int) -> str:
    return "\n".join(" " * by + line for line in lines)


def write_merge(even: str) -> Kernel:
    """The kernel that joins the moments of parts."""
    return _make_kernel(_HEAD.replace("BUFFERS", "p0, p1, r0, r1") + _MERGE, ["f32"] * 2, 2, LAST, even)
