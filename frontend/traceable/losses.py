# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Losses that PyTorch computes by looking at what is in a tensor, as formulas of all of its elements."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from retrograd.frontend.layers.ctc_loss import REDUCTIONS


def gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    """``F.gaussian_nll_loss`` without its check: a variance below zero, which eager refuses, gives NaN.

    Returns ``NotImplemented`` for what eager refuses by types and shapes, and for a variance that is a number.
    """
    if not isinstance(var, Tensor) or reduction not in REDUCTIONS:
        return NotImplemented
    if var.shape != input.shape:
        if var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
        elif var.dim() != input.dim() or sum(a != b for a, b in zip(input.shape, var.shape, strict=True)) != 1:
            return NotImplemented
    var = torch.where(var < 0, math.nan, var)
    # As in eager: a variance that is raised to eps still gets a gradient.
    with torch.no_grad():
        raised = var.clamp(min=eps)
    var = torch.where(var < eps, var - var.detach() + raised, var)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return REDUCTIONS[reduction](loss + 0.5 * math.log(2 * math.pi) if full else loss)


def multilabel_margin_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``F.multilabel_margin_loss`` of a single row, whose loss is a scalar; of PyTorch's formula it has an axis."""
    loss = F.multilabel_margin_loss(input, target, *args, **kwargs)
    return loss.reshape(()) if input.dim() == 1 else loss
