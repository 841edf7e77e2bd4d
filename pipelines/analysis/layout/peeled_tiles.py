# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles for products on plain operands on a CPU with vectors of 512 bits, whose rest is a loop of its own.

For such vectors IREE takes the largest tile that divides a product's sides, and of a side of 401 tokens that is one row
or one column. On one core of an Intel Xeon with AVX-512, in f32, GFLOP/s of its tile, of 8 x 32 whose rest is peeled
off, and of PyTorch: of 401 x 401 in sums of 32 terms, six at once, 1.5, 44 and 65; of 197 x 197 in sums of 64 terms
1.9, 57 and 92; of 400 x 400 in sums of 64 terms, where it divides the sides by itself, 28, 80 and 73; and 2.2, 31 and
64 where the second matrix of the first lies transposed. Masks in place of a rest gave 12 to 30, and tiles of 4 x 32
more in one of seven shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

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
