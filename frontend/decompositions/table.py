# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Lists the replacements for aten ops while a graph is traced, with the reason for each.

``DECOMPOSITIONS`` is the whole of it, as data: each entry is right against eager for every input it does not turn
away, and an entry that turns an input away keeps the op for torch-mlir to lower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload
from torch_mlir.extras.fx_decomp_util import get_decomposition_table

from retrograd.frontend.decompositions import attention, class_gradients, functions, numerics, quotients, sampling, sums
from retrograd.frontend.decompositions.convolutions import convolution
from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.decompositions.matrices import distances, experts
from retrograd.frontend.decompositions.places import (
    grid_sample,
    indexing,
    interpolation,
    masked_writes,
    resizing,
    sorting,
    whole_rows,
)
from retrograd.frontend.decompositions.pooling import adaptive_pooling, pooling_forward, pooling_gradients
from retrograd.frontend.decompositions.views import axes, copies, strided
from retrograd.frontend.layers import biased_attention, cudnn_layers, lstm_layers
from retrograd.frontend.libraries.ops import keeping_library_ops

__all__ = ["DECOMPOSITIONS", "Decomposition", "decomposition_table", "tracing_table"]

DECOMPOSITIONS: tuple[Decomposition, ...] = (
    *convolution.ENTRIES,
    *attention.ENTRIES,
    *pooling_gradients.ENTRIES,
    *pooling_forward.ENTRIES,
    *adaptive_pooling.ENTRIES,
    *indexing.ENTRIES,
    *whole_rows.ENTRIES,
    *masked_writes.ENTRIES,
    *resizing.ENTRIES,
    *interpolation.ENTRIES,
    *experts.ENTRIES,
    *class_gradients.ENTRIES,
    *distances.ENTRIES,
    *copies.ENTRIES,
    *grid_sample.ENTRIES,
    *functions.ENTRIES,
    *numerics.ENTRIES,
    *quotients.ENTRIES,
    *sampling.ENTRIES,
    *sorting.ENTRIES,
    *axes.ENTRIES,
    *strided.ENTRIES,
    *sums.ENTRIES,
    *lstm_layers.ENTRIES,
    *cudnn_layers.ENTRIES,
    *biased_attention.ENTRIES,
)


def decomposition_table() -> dict[OpOverload, Callable[..., Any]]:
    """torch-mlir's table with ``DECOMPOSITIONS`` over it; a new dictionary at each call."""
    entries = (*DECOMPOSITIONS, *experts.find_named())
    return {**get_decomposition_table(), **{entry.op: entry.function for entry in entries}}


def tracing_table() -> dict[OpOverload, Callable[..., Any]]:
    """The table for a graph that is to be compiled: without the ops that PyTorch's libraries are to compute now."""
    return keeping_library_ops(decomposition_table())
