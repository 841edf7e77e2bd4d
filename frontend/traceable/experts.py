# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of a mixture's experts, traced where a library's gradient of them loops over how many rows each has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.matrices.experts import grouped_mm_backward, has_fixed_sizes, multiply_groups

_PRODUCT = "transformers.grouped_mm_fallback"
_NAMES = frozenset((_PRODUCT, f"{_PRODUCT}.default"))
_GRADIENT = "grouped_mm_fallback_backward"


class GroupedProduct(torch.autograd.Function):
    """``multiply_groups`` with a gradient that reads no sizes from ``offsets``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, offsets: Tensor) -> Any:
        """``[rows, n]`` and ``[groups, n, m]`` to ``[rows, m]``."""
        ctx.save_for_backward(rows, matrices, offsets)
        return multiply_groups(rows, matrices, offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradients of the rows and of the matrices."""
        rows, matrices, offsets = ctx.saved_tensors
        return (*grouped_mm_backward(rows, matrices, offsets, gradients[0]), None)


def find_product(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Finds the function to call in the place of transformers' product of groups, if ``func`` is that and its gradient
    is Python code that asks for the offsets' values, as in releases up to 5.17; later ones have an op of its own for
    it, which is decomposed."""
    if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) or str(func) not in _NAMES:
        return None
    return None if hasattr(torch.ops.transformers, _GRADIENT) else multiply


def multiply(input: Tensor, weight: Tensor, offs: Tensor) -> Any:
    """The product of each row of ``input [rows, n]`` with the matrix of its group in ``weight [groups, n, m]``, groups
    ending before the rows ``offs``; ``NotImplemented`` for open sizes."""
    if not has_fixed_sizes(input, weight, offs):
        return NotImplemented
    return GroupedProduct.apply(input, weight, offs)  # type: ignore[no-untyped-call]
