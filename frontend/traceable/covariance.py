# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Covariances as PyTorch defines them, without its checks of what is in the weights (``aten/native/Correlation.cpp``).
Weights that eager refuses (negative ones, and such as add up to zero) give other numbers or NaN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cov(x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Any:
    """``torch.cov``: of ``x [variables, observations]`` or ``[observations]``, ``[variables, variables]`` or a scalar.
    Returns ``NotImplemented`` for what eager refuses by types and shapes."""
    rows = x if x.dim() == 2 else x.reshape(1, -1)
    count = rows.shape[1]
    given = [w for w in (fweights, aweights) if w is not None]
    if x.dim() > 2 or x.dtype == torch.bool or any(w.dim() > 1 or w.numel() != count for w in given):
        return NotImplemented
    if fweights is not None and (fweights.is_floating_point() or fweights.dtype == torch.bool or fweights.is_complex()):
        return NotImplemented
    if aweights is not None and not aweights.is_floating_point():
        return NotImplemented
    weights = given[0] * given[1] if len(given) == 2 else given[0] if given else torch.ones((), device=x.device)
    # In the type of the result, or of the weights where that has more digits.
    total = weights.sum() if given else weights * count
    mean = (rows * weights if given else rows).sum(1, keepdim=True) / total
    centered = rows - mean
    degrees = total - correction
    if aweights is not None and correction != 0:
        degrees = total - correction * (weights * aweights).sum() / total
    product = torch.mm(centered, (centered * weights if given else centered).t().conj())
    # None left is a division by zero to eager, too.
    return torch.true_divide(product, degrees.clamp(min=0)).squeeze()


def corrcoef(x: Tensor) -> Any:
    """``torch.corrcoef``: Pearson's coefficients of the rows of ``x``, clipped to [-1, 1]."""
    covariance = cov(x)
    if covariance is NotImplemented or covariance.is_complex():
        return NotImplemented
    if covariance.dim() == 0:
        return covariance / covariance
    deviations = covariance.diagonal().sqrt()
    return (covariance / deviations.unsqueeze(1) / deviations.unsqueeze(0)).clip(-1, 1)
