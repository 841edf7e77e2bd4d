# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Norms, and distances between all pairs of rows: differences and a reduction, which fuse."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_mlir.extras.fx_decomp_util import get_decomposition_table

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition
from retrograd.frontend.decompositions.sums import computed

aten = torch.ops.aten

_TABLE = get_decomposition_table()


def cdist(x: Tensor, y: Tensor, p: float, compute_mode: int | None = None) -> Tensor:
    """``aten._cdist_forward``: ``[..., n, m]`` of ``x [..., n, d]`` and ``y [..., m, d]``; exact in every mode."""
    return _length(x.unsqueeze(-2) - y.unsqueeze(-3), p)


def cdist_backward(grad: Tensor, x: Tensor, y: Tensor, p: float, distances: Tensor) -> Tensor:
    """``aten._cdist_backward``: the gradient of ``x``, over all axes that ``x`` and ``y`` are broadcast to."""
    slope = _slope(x.unsqueeze(-2) - y.unsqueeze(-3), p, distances.unsqueeze(-1))
    return (grad.unsqueeze(-1) * slope).sum(-2)


def vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """``aten.linalg_vector_norm``, over all axes if ``dim`` is ``None``: that of a single number, its magnitude, or how
    many it is (0 or 1) for the order 0, and that of an order that f32 does not have exactly."""
    kind = dtype or x.dtype
    if x.dim() == 0:
        return (x != 0).to(kind) if ord == 0 else x.to(kind).abs()
    if ctypes.c_float(ord).value == ord:
        op = aten.linalg_vector_norm.default
        return _TABLE[op](x, ord, dim, keepdim, dtype=dtype) if op in _TABLE else NotImplemented
    axes = list(range(x.dim())) if dim is None or len(dim) == 0 else list(dim)
    powers: Tensor = aten.sum.dim_IntList(computed(x.to(kind)).abs() ** ord, axes, keepdim)
    return (powers ** (1 / ord)).to(kind)


def _length(difference: Tensor, p: float) -> Tensor:
    """The p-norm along the last axis."""
    size = difference.abs()
    if difference.shape[-1] == 0:
        return difference.new_zeros(difference.shape[:-1])
    if p == 0:
        # What is no number stays none.
        return torch.clamp(torch.ceil(size), max=1.0).sum(-1)
    if p == 1:
        return size.sum(-1)
    if p == 2:
        return torch.sqrt((difference * difference).sum(-1))
    return size.amax(-1) if math.isinf(p) else (size**p).sum(-1) ** (1 / p)


def _slope(difference: Tensor, p: float, distance: Tensor) -> Tensor:
    """The derivative of `_length` by each difference, zero where there is none: PyTorch's convention.

    Source: PyTorch's ``DistanceOpsKernel.cpp``.
    """
    sign, size = torch.sign(difference), difference.abs()
    if p == 0:
        return torch.zeros_like(difference)
    if p == 1:
        return sign
    if math.isinf(p):
        return sign * (size == distance).to(difference.dtype)
    # Also with p < 1 where a single difference is zero: its power would be infinite.
    none = (distance == 0) | ((size == 0) if p < 1 else torch.zeros_like(size, dtype=torch.bool))
    ratio = torch.where(none, 1.0, size) / torch.where(none, 1.0, distance)
    return torch.where(none, 0.0, sign * (ratio if p == 2 else ratio ** (p - 1)))


ENTRIES = (
    Decomposition(aten._cdist_forward.default, cdist, NO_LOWERING),
    Decomposition(aten._cdist_backward.default, cdist_backward, NO_LOWERING),
    Decomposition(
        aten.linalg_vector_norm.default,
        vector_norm,
        "torch-mlir refuses a tensor of no axis, and rounds the order to f32 where iree-compile does not compile that",
    ),
)
