# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Losses over classes, and their gradients: element by element, with no index into a tensor as large as the scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import Decomposition

aten = torch.ops.aten
_NONE, _MEAN = 0, 1


def nll_loss_forward(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """``nll_loss`` and ``nll_loss2d`` of log-probabilities ``self``, shape [classes], [batch, classes] or [batch,
    classes, height, width]: the loss, and the sum of the weights of the targets that are not ignored."""
    axis = min(self.dim() - 1, 1)
    target, is_counted, is_class = _read_targets(self, target, ignore_index, axis)
    hit = _compare(self, target, axis) & is_counted
    zero = self.new_zeros(())
    weighted = self if weight is None else self * _along(weight, self, axis)
    loss = -torch.where(hit, weighted, zero).sum(axis)
    loss = torch.where(is_class.squeeze(axis), loss, loss.new_full((), math.nan))
    if reduction == _NONE and self.dim() > 1:
        return loss, zero
    if weight is None:
        total = is_counted.sum().to(self.dtype)
    else:
        total = torch.where(hit, _along(weight, self, axis), zero).sum().to(self.dtype)
    loss = loss.sum()
    return (loss / total if reduction == _MEAN else loss), total


def nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """The gradient of ``nll_loss_forward`` with respect to ``self``: at the class of each target that is not ignored,
    zero elsewhere."""
    axis = min(self.dim() - 1, 1)
    if reduction == _MEAN:
        grad_output = grad_output / total_weight
    gradient = -(grad_output.unsqueeze(axis) if self.dim() > grad_output.dim() > 0 else grad_output)
    if weight is not None:
        gradient = gradient * _along(weight, self, axis)
    target, is_counted, is_class = _read_targets(self, target, ignore_index, axis)
    gradient = torch.where(is_class, gradient, gradient.new_full((), math.nan))
    hit = (_compare(self, target, axis) & is_counted) | ~is_class
    return torch.where(hit, gradient, gradient.new_zeros(())).to(self.dtype)


def _read_targets(scores: Tensor, target: Tensor, ignored: int, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """The targets, to be broadcast to all classes, with class 0 in the place of what is ignored; whether each is not
    ignored, and whether it is a class. What is none, which eager refuses, gives NaN, as other indices do that the
    program computes and that are out of range."""
    target = target.unsqueeze(axis)
    is_counted = target != ignored
    # find_index_bounds knows this form.
    target = torch.where(is_counted, target, 0)
    return target, is_counted, (target >= 0) & (target < scores.shape[axis])


def _compare(scores: Tensor, target: Tensor, axis: int) -> Tensor:
    """Of each class whether it is the target's: bool, in the shape of ``scores``."""
    return _along(torch.arange(scores.shape[axis], device=scores.device), scores, axis) == target


def _along(values: Tensor, scores: Tensor, axis: int) -> Tensor:
    """One value for each class, to be broadcast."""
    shape = [1] * scores.dim()
    shape[axis] = scores.shape[axis]
    return values.reshape(shape)


_SCATTERED = (
    "PyTorch's own scatters into zeros: with a vocabulary that is a tensor as large as the logits, written and read "
    "once more, where a comparison with the number of the class is part of the kernel that uses it"
)
_GATHERED = (
    "PyTorch's own gathers from the log-probabilities, which are written for that: a tensor as large as the logits, "
    "where a sum over the classes reads what these are computed from"
)
ENTRIES = (
    Decomposition(aten.nll_loss_forward.default, nll_loss_forward, _GATHERED),
    Decomposition(aten.nll_loss2d_forward.default, nll_loss_forward, _GATHERED),
    Decomposition(aten.nll_loss_backward.default, nll_loss_backward, _SCATTERED),
    Decomposition(aten.nll_loss2d_backward.default, nll_loss_backward, _SCATTERED),
)
