# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which matrix products of long sums a CPU computes in pieces of their sums, on packed operands.

IREE runs along the whole sum for each tile of 16 x 16 results. Of a long sum the packed rows that a tile reads are no
longer in the second level of cache when the next tile reads them. On one core of an Intel Xeon with 2 MiB of it, in
f32, 1024 x 768 results of sums of 3072 took 63 ms (77 GFLOP/s), of sums of 12288 468 ms (41 GFLOP/s), and in pieces of
512, 1024 and 2048 terms 236, 245 and 275 ms. 1024 x 384 results of sums of 5000 took as long in pieces, of 8192 1.5
times as long in one piece.
"""

from __future__ import annotations

from itertools import pairwise

LEAST_INNER = 6144
# Fewer rows or columns are a filter's gradient, which bwd-mark-products has split without packing.
LEAST_SIDE, LEAST_VOLUME = 256, 1 << 29
# Terms of a piece; each piece is some kernels more to compile, so that very long sums have longer ones.
_TERMS, _MANY_TERMS, _VERY_LONG = 1024, 2048, 1 << 14


def find_pieces(rows: int, inner: int, columns: int) -> list[tuple[int, int]]:
    """Where each piece of the sums begins, and how many terms it has, for a product of ``rows`` x ``inner`` and
    ``inner`` x ``columns``; none for one that is computed whole. All pieces but the last one are as long."""
    if inner < LEAST_INNER or min(rows, columns) < LEAST_SIDE or rows * inner * columns < LEAST_VOLUME:
        return []
    ideal = round(inner / (_MANY_TERMS if inner > _VERY_LONG else _TERMS))
    # The last piece has kernels of its own where it is shorter.
    near = sorted(range(-(-2 * ideal // 3), 3 * ideal // 2 + 1), key=lambda count: (abs(count - ideal), -count))
    count = next((count for count in near if inner % count == 0), ideal)
    starts = range(0, inner, -(-inner // count))
    return [(start, end - start) for start, end in pairwise([*starts, inner])]
