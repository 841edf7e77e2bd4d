# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whole quotients, and what is left beside them, as exact as in C: rounded quotients are off by one now and then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import Decomposition

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)


def _joined(x: Tensor, y: Tensor | float, *, rounded: bool) -> tuple[Tensor, Tensor, torch.dtype] | None:
    """Both in the type in which they are computed with, and that of the result; ``None`` for whole numbers. A divisor
    that is a number is ``rounded`` to the type of the result first, or not, as in eager."""
    kind = torch.result_type(x, y)
    if not kind.is_floating_point:
        return None
    wide = torch.float32 if kind in _HALF else kind
    divisor = y if isinstance(y, Tensor) else torch.full([], y, dtype=kind if rounded else wide, device=x.device)
    return x.to(wide), (divisor.to(kind) if rounded else divisor).to(wide), kind


def _left_over(x: Tensor, y: Tensor) -> Tensor:
    """Return what is left of ``x``, with its sign: of magnitudes it is what ``aten.remainder`` has."""
    return torch.copysign(torch.remainder(x.abs(), y.abs()), x)


def fmod(x: Tensor, y: Tensor | float) -> Any:
    """``aten.fmod`` of floats."""
    joined = _joined(x, y, rounded=True)
    return NotImplemented if joined is None else _left_over(*joined[:2]).to(joined[2])


def divide(x: Tensor, y: Tensor | float, *, rounding_mode: str | None) -> Any:
    """``aten.div`` of floats, rounded down; towards zero of half types by one number, which eager takes as it is. By a
    tensor of a half type the quotient is one too before it is cut, of which LLVM drops the rounding.

    Source: ``div_floor_floating`` of PyTorch's ``c10/util/generic_math.h``.
    """
    joined = _joined(x, y, rounded=False)
    if rounding_mode is None or joined is None:
        return NotImplemented
    x, divisor, kind = joined
    if rounding_mode == "trunc":
        return torch.trunc(x / divisor).to(kind) if kind in _HALF and divisor.dim() == 0 else NotImplemented
    left = _left_over(x, divisor)
    quotient = (x - left) / divisor
    quotient = torch.where((left != 0) & ((left < 0) != (divisor < 0)), quotient - 1, quotient)
    down = torch.floor(quotient)
    down = torch.where(quotient - down > 0.5, down + 1, down)
    down = torch.where(quotient == 0, torch.copysign(torch.zeros_like(quotient), x / divisor), down)
    return torch.where(divisor == 0, x / divisor, down).to(kind)


def floor_divide(x: Tensor, y: Tensor | float) -> Tensor:
    """``aten.floor_divide``. Of whole numbers it is a division, as in PyTorch's decomposition: torch-mlir crashes on
    this op of unsigned ones."""
    quotient: Tensor = torch.div(x, y, rounding_mode="floor")
    return quotient


_OFF_BY_ONE = "torch-mlir rounds the rounded quotient, so that 1.5 / 0.3 is 5, and 4 in PyTorch; NaN by infinity"

ENTRIES = (
    *(Decomposition(op, fmod, _OFF_BY_ONE) for op in (aten.fmod.Tensor, aten.fmod.Scalar)),
    *(Decomposition(op, divide, _OFF_BY_ONE) for op in (aten.div.Tensor_mode, aten.div.Scalar_mode)),
    *(Decomposition(op, floor_divide, _OFF_BY_ONE) for op in (aten.floor_divide.default, aten.floor_divide.Scalar)),
)
