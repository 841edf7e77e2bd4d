# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Backward ops as the derivatives of what their forward ops decompose to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def pull_back(function: Callable[..., Tensor], primals: Sequence[Tensor], tangent: Tensor) -> tuple[Tensor, ...]:
    """The gradients of ``primals`` that ``tangent``, that of ``function(*primals)``, gives: of each its shape, zeros
    where nothing depends on it.

    PyTorch differentiates ``function`` while the ops of both are traced.
    """
    # In a decomposition the tracer is at work and autograd has been left behind.
    with torch.overrides.enable_reentrant_dispatch(), torch.enable_grad():
        leaves = [p.detach().requires_grad_() for p in primals]
        found = torch.autograd.grad(function(*leaves), leaves, tangent.detach(), allow_unused=True)
    return tuple(torch.zeros_like(p) if g is None else g.detach() for p, g in zip(primals, found, strict=True))
