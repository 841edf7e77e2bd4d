# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Axes that are counted from the end, for ops whose lowering takes the number as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from retrograd.frontend.decompositions.entry import Decomposition

aten = torch.ops.aten


def counted_from_front(op: OpOverload) -> Callable[..., Any]:
    """``op(x, dim, ...)`` with ``dim`` at least 0; ``NotImplemented`` where it is."""

    def function(x: Tensor, dim: int, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if dim >= 0 else op(x, dim + max(x.dim(), 1), *args, **kwargs)

    return function


_TAKEN_AS_IT_IS = "torch-mlir writes to the wrong axis, or aborts, where it is counted from the end"

# The other scatters become index_put, in indexing.py.
ENTRIES = (Decomposition(aten.scatter_reduce.two, counted_from_front(aten.scatter_reduce.two), _TAKEN_AS_IT_IS),)
