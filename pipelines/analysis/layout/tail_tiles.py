# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles without a tail for products whose second matrix is transposed in memory, on a CPU.

IREE computes 8 x 16 elements of the result at a time, in steps of 16 terms. What 16 does not divide it masks at the
end: of 21 columns rows 16 to 31 of the transposed matrix are read, eleven of them masked and behind its end. On an AMD
EPYC with AVX-512 such loads took most of the time: with a tile that divides both sides, 16 x 21 in sums of 4096 terms
took 0.19 ms in place of 1.4, 64 x 27 took 0.42 in place of 1.1, and 64 x 100 took 0.86 in place of 1.9. With vectors of
256 bits such tiles were slower. Gradients of the first filters of a convolutional net are of that kind: three colors
times the width of the filter.
"""

from __future__ import annotations

from dataclasses import dataclass

# What IREE computes at a time: elements of a column, of a row, and terms of the sum.
_ROWS, _COLUMNS, _TERMS = 8, 16, 16
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
    if columns < _COLUMNS or columns % _COLUMNS == 0 or terms % _TERMS:
        return None
    tall, wide = _divide(rows, _ROWS), _divide(columns, _COLUMNS)
    if tall < _LEAST_ROWS or wide < _LEAST_COLUMNS:
        return None
    return TailTile(tall, wide, _TERMS, min(columns, _MOST_COLUMNS // wide * wide))


def _divide(size: int, most: int) -> int:
    return max(divisor for divisor in range(1, most + 1) if size % divisor == 0)
