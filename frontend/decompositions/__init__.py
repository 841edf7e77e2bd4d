# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What stands in for an aten op while a graph is traced, and why.

``DECOMPOSITIONS`` is the whole of it, as data: each entry is right against eager for every input it does not turn
away, and an entry that turns an input away keeps the op for torch-mlir to lower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload
from torch_mlir.extras.fx_decomp_util import get_decomposition_table

from retrograd.frontend.decompositions import (
    adaptive_pooling,
    alignments,
    attention,
    bags,
    bessel,
    classes,
    convolution,
    copies,
    distances,
    elementary,
    experts,
    exponentials,
    factorizations,
    float_parts,
    fractional_pooling,
    gamma,
    hyperbolic,
    indexing,
    masked,
    numerics,
    pooling,
    pooling_forward,
    sampling,
    sampling_grids,
    scalars,
    scans,
    segments,
    sorting,
    special,
    splits,
    strided,
    sums,
    triangular,
)
from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.libraries.ops import keeping_library_ops

__all__ = ["DECOMPOSITIONS", "Decomposition", "decomposition_table", "tracing_table"]

DECOMPOSITIONS: tuple[Decomposition, ...] = (
    *convolution.ENTRIES,
    *attention.ENTRIES,
    *pooling.ENTRIES,
    *pooling_forward.ENTRIES,
    *adaptive_pooling.ENTRIES,
    *indexing.ENTRIES,
    *masked.ENTRIES,
    *segments.ENTRIES,
    *experts.ENTRIES,
    *classes.ENTRIES,
    *distances.ENTRIES,
    *bags.ENTRIES,
    *copies.ENTRIES,
    *sampling_grids.ENTRIES,
    *float_parts.ENTRIES,
    *fractional_pooling.ENTRIES,
    *gamma.ENTRIES,
    *numerics.ENTRIES,
    *sampling.ENTRIES,
    *sorting.ENTRIES,
    *scans.ENTRIES,
    *scalars.ENTRIES,
    *elementary.ENTRIES,
    *hyperbolic.ENTRIES,
    *exponentials.ENTRIES,
    *bessel.ENTRIES,
    *special.ENTRIES,
    *splits.ENTRIES,
    *strided.ENTRIES,
    *sums.ENTRIES,
    *triangular.ENTRIES,
    *factorizations.ENTRIES,
    *alignments.ENTRIES,
)


def decomposition_table() -> dict[OpOverload, Callable[..., Any]]:
    """torch-mlir's table with ``DECOMPOSITIONS`` over it; a new dictionary at each call."""
    entries = (*DECOMPOSITIONS, *experts.find_named())
    return {**get_decomposition_table(), **{entry.op: entry.function for entry in entries}}


def tracing_table() -> dict[OpOverload, Callable[..., Any]]:
    """The table for a graph that is to be compiled: without the ops that PyTorch's libraries are to compute now."""
    return keeping_library_ops(decomposition_table())
