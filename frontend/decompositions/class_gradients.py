# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Gradients of losses over classes, element by element. `frontend/layers/class_losses.py` knows their form."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import Decomposition

aten = torch.ops.aten
_MEAN = 1


def nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """The gradient of ``nll_loss`` and ``nll_loss2d`` with respect to log-probabilities ``self``, shape [classes],
    [batch, classes] or [batch, classes, height, width]: at the class of each target that is not ignored, zero
    elsewhere."""
    axis = min(self.dim() - 1, 1)
    if reduction == _MEAN:
        grad_output = grad_output / total_weight
    target = target.unsqueeze(axis)
    is_counted = target != ignore_index
    # What is no class, which eager refuses, gives NaN, as other indices do that the program computes and that are out
    # of range: at class 0.
    is_other = is_counted & ~((target >= 0) & (target < self.shape[axis]))
    gradient = -(grad_output.unsqueeze(axis) if self.dim() > grad_output.dim() > 0 else grad_output)
    gradient = torch.where(is_other, gradient.new_full((), math.nan), gradient)
    gradient = torch.where(is_counted, gradient, gradient.new_zeros(()))
    if weight is not None:
        gradient = gradient * _along(weight, self, axis)
    # All that is worked out for a row is so before it meets the classes: kernels fuse what has few operands.
    target = torch.where(is_counted, torch.where(is_other, 0, target), -1).to(torch.int32)
    classes = _along(torch.arange(self.shape[axis], dtype=torch.int32, device=self.device), self, axis)
    return torch.where(classes == target, gradient, gradient.new_zeros(())).to(self.dtype)


def _along(values: Tensor, scores: Tensor, axis: int) -> Tensor:
    """Shape a value for each class so that it can be broadcast."""
    shape = [1] * scores.dim()
    shape[axis] = scores.shape[axis]
    return values.reshape(shape)


_SCATTERED = (
    "PyTorch's own scatters into zeros: with a vocabulary that is a tensor as large as the logits, written and read "
    "once more, where a comparison with the number of the class is part of the kernel that uses it"
)
ENTRIES = tuple(
    Decomposition(op, nll_loss_backward, _SCATTERED)
    for op in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
)
