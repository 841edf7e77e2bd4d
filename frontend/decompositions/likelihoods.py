# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The gradient of negative log-likelihoods, without a tensor of ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import Decomposition

aten = torch.ops.aten
_MEAN = 1


def nll_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Any:
    """``aten.nll_loss_backward`` and ``nll_loss2d_backward``: ``x [N, C, ...]`` or ``[C]``, ``target`` (int64) without
    the axis of classes; each element asks whether its class is the target, a comparison that fuses with what uses it.
    """
    axis = 0 if x.dim() < 2 else 1
    scale = -(grad / total_weight if reduction == _MEAN else grad)
    if x.dim() == 1 and target.dim() > 0:
        # Without a batch eager's kernel looks at the first target alone.
        target = target[0]
    if x.dim() > scale.dim() > 0:
        scale = scale.unsqueeze(axis)
    line = [1] * x.dim()
    line[axis] = x.shape[axis]
    if weight is not None:
        scale = scale * weight.reshape(line)
    # Four bytes compare twice as many at a time as eight, and there are no 2^31 classes.
    picked = torch.where(target == ignore_index, -1, target).to(torch.int32).unsqueeze(axis)
    classes = torch.arange(x.shape[axis], device=x.device, dtype=torch.int32).reshape(line)
    return torch.where(classes == picked, scale, torch.zeros((), dtype=x.dtype, device=x.device))


_SCATTER = "PyTorch scatters into zeros as large as the scores, which a kernel writes and the next one reads"

ENTRIES = (
    Decomposition(aten.nll_loss_backward.default, nll_loss_backward, _SCATTER),
    Decomposition(aten.nll_loss2d_backward.default, nll_loss_backward, _SCATTER),
)
