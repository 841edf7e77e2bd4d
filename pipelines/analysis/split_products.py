# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Into how many partial sums IREE splits a matrix product whose inner size is far larger than its result.

A split product reads its operands as they are, not packed, and writes all partial sums before they are added up.
Source: IREE's ``DispatchCreation/SetSplitReductionSizes.cpp``, whose thresholds are repeated here, and what IREE 3.13
does: larger results than ``_MOST_RESULT`` were never seen to be split.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

_MOST_SIDE = 1024
_MOST_RESULT = 128 * 128
_LEAST_RATIO = 384
_LARGE_INNER = 24576
# From how many elements of the result on at most how many parts.
_PARTS = ((64 * 64, 64), (16 * 16, 128), (0, 2048))

Shape = tuple[int, ...] | None


def find_parts(name: str, operands: Sequence[Shape]) -> int:
    """The number of partial sums of the op ``name`` on operands of these shapes; 1 for what is not split."""
    if name not in ("torch.aten.mm", "torch.aten.bmm") or None in operands[:2]:
        return 1
    left, right = (s for s in operands[:2] if s is not None)
    batch = left[0] if len(left) == 3 else 1
    rows, inner, columns = left[-2], left[-1], right[-1]
    result = batch * rows * columns
    if max(rows, columns) > _MOST_SIDE or not 0 < result < _MOST_RESULT:
        return 1
    if inner / sqrt(rows * columns) / batch <= _LEAST_RATIO and inner < _LARGE_INNER:
        return 1
    most = next(parts for size, parts in _PARTS if result >= size)
    return inner // _least_factor(inner, -(-inner // most))


def _least_factor(size: int, least: int) -> int:
    """The smallest factor of ``size`` that is not below ``least``."""
    return next(f for f in range(least, size + 1) if size % f == 0)
