# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Several axes of one element taken away at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import Decomposition

aten = torch.ops.aten


def squeeze(x: Tensor, axes: Sequence[int]) -> Any:
    """``aten.squeeze.dims`` as one view; by an op for each axis where a size is a symbol, which is not asked."""
    if not all(isinstance(size, int) for size in x.shape):
        return torch._refs.squeeze(x, tuple(axes))
    gone = {axis % max(x.dim(), 1) for axis in axes}
    return aten.view.default(x, [size for axis, size in enumerate(x.shape) if axis not in gone or size != 1])


ENTRIES = (
    Decomposition(
        aten.squeeze.dims, squeeze, "PyTorch takes an op for each axis: nine of each batch norm, which are traced"
    ),
)
