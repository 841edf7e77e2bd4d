# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which matrix products a CPU computes on packed operands (IREE's data tiling), and which in parts of their sums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

Shape = tuple[int, ...] | None

# -- Packed ------------------------------------------------------------------------------------------------------------

# Which matrix products are worth packing the operands of (IREE's data tiling) on a CPU.
# A product on packed operands runs at the same speed whatever its shape and however its operands are transposed;
# packing reads and writes each of them once. On two cores with AVX-512, in f32, with M * N * K below 2**26 the plain
# product won 33 of 39 times, by up to a factor of two; from there on the packed one won 18 of 30, by as much, and
# lost little. IREE has such a threshold too, in releases after 3.13.

LEAST_VOLUME = 1 << 26
PRODUCTS = ("torch.aten.mm", "torch.aten.bmm", "torch.aten.addmm", "torch.aten.baddbmm", "torch.aten.matmul")


def repays_packing(name: str, operands: Sequence[Shape], element_type: str) -> bool:
    """Whether IREE is to pack the operands of the product ``name``, an op of torch's, on operands of these shapes.

    True where that cannot be told: for open sizes, and for other types than f32, of which plain products are slower
    still. False for an op that is no product, and for a product that is split: the two together do not compile.
    """
    if name not in PRODUCTS:
        return False
    # Scalars have no shape, and what a product is added to comes first.
    shapes = [shape for shape in operands if shape is not None][-2:]
    if len(shapes) < 2:
        return True
    if find_part(name, operands) is not None:
        return False
    if element_type != "f32":
        return True
    left, right = shapes
    if min(len(left), len(right)) < 2:
        return False
    return left[-2] * left[-1] * right[-1] >= LEAST_VOLUME


# The same where the second matrix lies transposed, as a linear layer's weight does, on AMD CPUs with AVX-512. One core
# of an EPYC (Zen 4), float32, packing included: of 256 x 128 x 128 163 us for 201, of 256 x 256 x 256 426 for 579, of
# 64 x 768 x 768 1018 for 1464, of 512 x 512 x 128 841 for 1697: 107 GFLOP/s for 55. The two products of such a layer's
# gradients, which read no matrix so, take 1.0 to 1.16 times as long packed. Fewer rows do not repay packing the weight.

LEAST_TURNED_VOLUME, LEAST_TURNED_SIDE = 1 << 21, 64


def repays_packing_turned(operands: Sequence[Shape]) -> bool:
    """Whether such a product of two float32 matrices of these shapes repays it: one that is not split."""
    left, right = operands
    if left is None or right is None or find_part("torch.aten.mm", operands) is not None:
        return False
    rows, inner, columns = left[0], left[1], right[1]
    return min(rows, columns) >= LEAST_TURNED_SIDE and rows * inner * columns >= LEAST_TURNED_VOLUME


# -- Split -------------------------------------------------------------------------------------------------------------

# Into how many partial sums a matrix product is split on a CPU whose inner size is far larger than its result.
# IREE splits a product into as many parts as a GPU has use for, up to 2048. On two cores that took 1.3 to 5.7 times
# as long as no split, for seven of eight products measured, of weight gradients of convolutions most. In parts of
# ``LEAST_PART`` they took what they take unsplit, or up to a third less, and a sum of 65,536 terms is still added up
# in two levels, which rounds less. A split product reads its operands as they are, not packed, and writes all partial
# sums before they are added up. Source: IREE's ``DispatchCreation/SetSplitReductionSizes.cpp``, whose thresholds for
# what to split are repeated here.

LEAST_PART = 4096
_LEAST_RATIO = 48
_LARGE_INNER = 18000
_MOST_RESULT = 2048 * 4096
# Results of these sizes have to be of very long sums.
_LARGE_RESULTS, _VERY_LARGE_INNER = range(1 << 20, 1500 << 10), 200000


def find_part(name: str, operands: Sequence[Shape]) -> int | None:
    """How many terms a partial sum of the op ``name`` (``torch.aten.mm``, ``torch.aten.bmm``) has on operands of these
    shapes: the inner size where it is one part alone; ``None`` for what IREE does not split."""
    if name not in ("torch.aten.mm", "torch.aten.bmm") or None in operands[:2]:
        return None
    left, right = (s for s in operands[:2] if s is not None)
    batch = left[0] if len(left) == 3 else 1
    rows, inner, columns = left[-2], left[-1], right[-1]
    result = batch * rows * columns
    if not 0 < result <= _MOST_RESULT or (result in _LARGE_RESULTS and inner < _VERY_LARGE_INNER):
        return None
    if int(inner / sqrt(rows * columns) / batch) < _LEAST_RATIO and inner < _LARGE_INNER:
        return None
    return next(size for size in range(min(inner, LEAST_PART), inner + 1) if inner % size == 0)


def find_parts(name: str, operands: Sequence[Shape]) -> int:
    """The number of partial sums of the op ``name`` on operands of these shapes; 1 for what is not split."""
    part, left = find_part(name, operands), operands[0] if operands else None
    return 1 if part is None or left is None else left[-1] // part


# -- In pieces, on packed operands -------------------------------------------------------------------------------------

# Which matrix products of long sums a CPU computes in pieces of their sums, on packed operands.
# IREE runs along the whole sum for each tile of 16 x 16 results. Of a long sum the packed rows that a tile reads are
# no longer in the second level of cache when the next tile reads them. On one core of an Intel Xeon with 2 MiB of it,
# in f32, 1024 x 768 results of sums of 3072 took 63 ms (77 GFLOP/s), of sums of 12288 468 ms (41 GFLOP/s), and in
# pieces of 512, 1024 and 2048 terms 236, 245 and 275 ms. 1024 x 384 results of sums of 5000 took as long in pieces,
# of 8192 1.5 times as long in one piece.

LEAST_INNER = 6144
# Fewer rows or columns are a filter's gradient, which bwd-mark-products has split without packing.
LEAST_SIDE, LEAST_LONG_VOLUME = 256, 1 << 29
# Terms of a piece; each piece is some kernels more to compile, so that very long sums have longer ones.
_TERMS, _MANY_TERMS, _VERY_LONG = 1024, 2048, 1 << 14


def find_pieces(rows: int, inner: int, columns: int) -> list[tuple[int, int]]:
    """Where each piece of the sums begins, and how many terms it has, for a product of ``rows`` x ``inner`` and
    ``inner`` x ``columns``; none for one that is computed whole. All pieces but the last one are as long."""
    if inner < LEAST_INNER or min(rows, columns) < LEAST_SIDE or rows * inner * columns < LEAST_LONG_VOLUME:
        return []
    ideal = round(inner / (_MANY_TERMS if inner > _VERY_LONG else _TERMS))
    # The last piece has kernels of its own where it is shorter.
    near = sorted(range(-(-2 * ideal // 3), 3 * ideal // 2 + 1), key=lambda count: (abs(count - ideal), -count))
    count = next((count for count in near if inner % count == 0), ideal)
    starts = range(0, inner, -(-inner // count))
    return [(start, end - start) for start, end in pairwise([*starts, inner])]
