# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sums of half types, added up in float32 as PyTorch's kernels do, and running sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from retrograd.frontend.decompositions.entry import Decomposition

aten = torch.ops.aten

HALF = (torch.bfloat16, torch.float16)
# Past this length of a row n * n elements are too many, and rows are cut into parts.
LONGEST = 4096


def computed(x: Tensor) -> Tensor:
    """``x`` in the type that it is added up in: half types are added up in f32 and rounded once."""
    return x.float() if x.dtype in HALF else x


def sum_of_channels(x: Tensor) -> Tensor:
    """The sum over all axes but the second, on a CPU by rows first.

    One after the other, a thousand terms that cancel out leave a hundred times the rounding of eager's blocks. On a GPU
    many threads have a part of the sum each, and a second kernel would write and read the rows.
    """
    if x.dim() == 2 or x.device.type != "cpu":
        return x.sum([0, *range(2, x.dim())])
    return x.sum(-1).sum([0, *range(2, x.dim() - 1)])


def in_float32(op: OpOverload) -> Callable[..., Any]:
    """``op`` on float32 values, rounded once at its end; ``NotImplemented`` for other types than half ones."""

    @wraps(op)
    def function(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        kind = dtype or x.dtype
        return op(x.float(), *args, **kwargs).to(kind) if kind in HALF else NotImplemented

    return function


def running(op: OpOverload) -> Callable[..., Any]:
    """``op``, running sums or products; torch-mlir refuses a single element without axes, which stays the element, and
    products in another type."""

    def function(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        if x.dim() == 0:
            return x.to(dtype or (x.dtype if x.dtype.is_floating_point else torch.int64), copy=True)
        if dtype is not None and dtype not in HALF:
            # Where no type is named, whole numbers give int64, whose last bits are those of any smaller type.
            is_whole = not (dtype.is_floating_point or dtype.is_complex)
            return op(x.to(torch.int64 if is_whole else dtype), dim).to(dtype)
        return in_float32(op)(x, dim, dtype=dtype)

    return function


def logcumsumexp(x: Tensor, dim: int) -> Any:
    """``aten.logcumsumexp``: the logarithm of running sums of exponentials, each from its own maximum."""
    if not x.dtype.is_floating_point:
        return NotImplemented
    if x.dim() == 0 or x.numel() == 0:
        return x.clone()
    return _running_excess(x.movedim(dim, -1)).movedim(-1, dim).contiguous()


def _running_excess(rows: Tensor) -> Tensor:
    """The same along the last axis.

    Element i reduces a row that is masked behind i: n * n elements, which fuse with the reduction and are never in
    memory. A long row is cut into as many parts as each has elements, and what is before a part is added to its own.
    """
    length = rows.shape[-1]
    if not isinstance(length, int) or length <= LONGEST:
        number = torch.arange(length, device=rows.device)
        masked = torch.where(number <= number.unsqueeze(-1), rows.unsqueeze(-2), -math.inf)
        shift = _finite(masked.amax(-1, keepdim=True))
        return torch.log(torch.exp(masked - shift).sum(-1)) + shift.squeeze(-1)
    width = math.isqrt(length - 1) + 1
    padded = torch.nn.functional.pad(rows, (0, -length % width), value=-math.inf)
    within = _running_excess(padded.unflatten(-1, (-1, width)))
    totals = _running_excess(within[..., -1])
    before = torch.nn.functional.pad(totals[..., :-1], (1, 0), value=-math.inf).unsqueeze(-1)
    shift = _finite(torch.maximum(within, before))
    summed = torch.log(torch.exp(within - shift) + torch.exp(before - shift)) + shift
    return summed.flatten(-2)[..., :length]


def _finite(highest: Tensor) -> Tensor:
    """A maximum that can be taken from its elements: an infinite one leaves NaN."""
    return torch.where(torch.isinf(highest), 0.0, highest)


ROUNDED = "torch-mlir adds up in the type itself: of 4,096 numbers in bfloat16 the sum is off by 1 to 90 percent"

ENTRIES = (
    *(
        Decomposition(op, in_float32(op), ROUNDED)
        for op in (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
    ),
    Decomposition(aten.cumsum.default, running(aten.cumsum.default), ROUNDED),
    Decomposition(aten.cumprod.default, running(aten.cumprod.default), "torch-mlir multiplies in the type itself"),
    Decomposition(
        aten.logcumsumexp.default, logcumsumexp, "torch-mlir's form overflows where an element is large, and gives inf"
    ),
)
