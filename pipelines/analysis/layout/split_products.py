# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Into how many partial sums a matrix product is split on a CPU whose inner size is far larger than its result.

IREE splits a product into as many parts as a GPU has use for, up to 2048. On two cores that took 1.3 to 5.7 times as
long as no split, for seven of eight products measured, of weight gradients of convolutions most. In parts of
``LEAST_PART`` they took what they take unsplit, or up to a third less, and a sum of 65,536 terms is still added up in
two levels, which rounds less. A split product reads its operands as they are, not packed, and writes all partial sums
before they are added up.
Source: IREE's ``DispatchCreation/SetSplitReductionSizes.cpp``, whose thresholds for what to split are repeated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

LEAST_PART = 4096
_LEAST_RATIO = 48
_LARGE_INNER = 18000
_MOST_RESULT = 2048 * 4096
# Results of these sizes have to be of very long sums.
_LARGE_RESULTS, _VERY_LARGE_INNER = range(1 << 20, 1500 << 10), 200000

Shape = tuple[int, ...] | None


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
