# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles of products on plain operands, for vectors of 512 bits on a CPU, where IREE's own are slow."""

from __future__ import annotations

from dataclasses import dataclass

# -- Sides that nothing divides ----------------------------------------------------------------------------------------

# Tiles for products on plain operands on a CPU with vectors of 512 bits, whose rest is a loop of its own.
# For such vectors IREE takes the largest tile that divides a product's sides, and of a side of 401 tokens that is one
# row or one column. On one core of an Intel Xeon with AVX-512, in f32, GFLOP/s of its tile, of 8 x 32 whose rest is
# peeled off, and of PyTorch: of 401 x 401 in sums of 32 terms, six at once, 1.5, 44 and 65; of 197 x 197 in sums of
# 64 terms 1.9, 57 and 92; of 400 x 400 in sums of 64 terms, where it divides the sides by itself, 28, 80 and 73; and
# 2.2, 31 and 64 where the second matrix of the first lies transposed. Masks in place of a rest gave 12 to 30, and
# tiles of 4 x 32 more in one of seven shapes.

_ROWS = 8
# Columns of a tile and the terms that it takes at a time: a step has 16 or 8 vectors of sums, and fewer terms the more.
_WIDE, _NARROW = (32, 4), (16, 8)
# From as many columns on the rest of the wide tile is little: of 49 the narrow one leaves 1, and the wide one 17.
_MANY_COLUMNS = 128


@dataclass(frozen=True)
class PeeledTile:
    """The sizes of a tile: ``rows`` x ``columns`` are computed at a time in steps of ``terms``."""

    rows: int
    columns: int
    terms: int


def find_peeled_tile(rows: int, columns: int, terms: int) -> PeeledTile | None:
    """The tile for a product of ``rows`` x ``columns`` in sums of as many ``terms``; ``None`` where a side is shorter
    than every tile."""
    wide = columns >= _WIDE[0] and (columns >= _MANY_COLUMNS or columns % _WIDE[0] < _NARROW[0])
    width, step = _WIDE if wide else _NARROW
    if rows < _ROWS or columns < width or terms < step:
        return None
    return PeeledTile(_ROWS, width, step)


# -- A second matrix that lies transposed ------------------------------------------------------------------------------

# Tiles without a tail for products whose second matrix is transposed in memory, on a CPU.
# IREE computes 8 x 16 elements of the result at a time, in steps of 16 terms. What 16 does not divide it masks at the
# end: of 21 columns rows 16 to 31 of the transposed matrix are read, eleven of them masked and behind its end. On an
# AMD EPYC with AVX-512 such loads took most of the time: with a tile that divides both sides, 16 x 21 in sums of 4096
# terms took 0.19 ms in place of 1.4, 64 x 27 took 0.42 in place of 1.1, and 64 x 100 took 0.86 in place of 1.9. With
# vectors of 256 bits such tiles were slower. Gradients of the first filters of a convolutional net are of that kind:
# three colors times the width of the filter.

# What IREE computes at a time: elements of a column, of a row, and terms of the sum.
_TAIL_ROWS, _TAIL_COLUMNS, _TAIL_TERMS = 8, 16, 16
# Smaller tiles gain less than masks cost.
_LEAST_ROWS, _LEAST_COLUMNS = 4, 5
# As many columns of the result are for one workgroup.
_MOST_COLUMNS = 64


@dataclass(frozen=True)
class TailTile:
    """The sizes of a tile: ``rows`` x ``columns`` are computed at a time in steps of ``terms``, for
    ``workgroup_columns`` at once."""

    rows: int
    columns: int
    terms: int
    workgroup_columns: int


def find_tail_tile(rows: int, columns: int, terms: int) -> TailTile | None:
    """The tile for a product of ``rows`` x ``columns`` in sums of as many ``terms``, of which IREE's own would leave a
    tail of columns; ``None`` where it leaves none, or where no tile divides the sides."""
    if columns < _TAIL_COLUMNS or columns % _TAIL_COLUMNS == 0 or terms % _TAIL_TERMS:
        return None
    tall, wide = _divide(rows, _TAIL_ROWS), _divide(columns, _TAIL_COLUMNS)
    if tall < _LEAST_ROWS or wide < _LEAST_COLUMNS:
        return None
    return TailTile(tall, wide, _TAIL_TERMS, min(columns, _MOST_COLUMNS // wide * wide))


def _divide(size: int, most: int) -> int:
    return max(divisor for divisor in range(1, most + 1) if size % divisor == 0)
