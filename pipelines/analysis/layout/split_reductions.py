# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Into how many partial sums IREE splits a reduction over the outermost axis, as of a bias or a batch norm.

The parts are written to memory by one kernel and added up by the next. Source: ``getOuterReductionSizes`` of IREE's
``DispatchCreation/SetSplitReductionSizes.cpp``, whose rule is repeated here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil, prod, sqrt

# Ops that lower to one such reduction, and whose second operand, if they have one, says over which axes.
REDUCTIONS = frozenset(f"torch.aten.{name}" for name in ("sum", "sum.dim_IntList", "mean.dim", "amax", "amin"))

_TARGET = 1024
_LEAST_PART = 4


def find_reduction_parts(shape: Sequence[int], axes: Collection[int]) -> int:
    """The number of parts of each result of a reduction of a tensor of ``shape`` over ``axes`` (not negative); 1 for
    one that is not split: over inner axes alone, or of fewer than 1024 terms."""
    # Axes of size 1 are dropped before.
    loops = [(size, axis in axes) for axis, size in enumerate(shape) if size != 1]
    sizes = [size for size, is_reduced in loops if is_reduced]
    if not sizes or not loops[0][1] or prod(sizes) < _TARGET:
        return 1
    wanted = min(_TARGET, max(_LEAST_PART, ceil(sqrt(prod(sizes)))))
    terms = 1
    for size in reversed(sizes):
        terms *= _find_factor(size, ceil(wanted / terms))
    return prod(sizes) // terms


def _find_factor(size: int, least: int) -> int:
    """The smallest factor of ``size`` that is ``least`` or more; ``size`` itself if there is none."""
    return next((factor for factor in range(least, size + 1) if size % factor == 0), size)
