# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions of PyTorch's that look at what is in a tensor, traced as functions that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from retrograd.frontend.ctc_loss import ctc_loss
from retrograd.frontend.losses import gaussian_nll_loss, multilabel_margin_loss


class TraceableFunctions(TorchFunctionMode):
    """While it is active, the functions below can be traced."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = _FUNCTIONS.get(func)
        result = formula(*args, **kwargs) if formula is not None else NotImplemented
        return func(*args, **kwargs) if result is NotImplemented else result


def index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    """``x.index_fill`` with a tensor of no axes. ``NotImplemented`` for numbers, and for names of axes."""
    if not isinstance(value, Tensor) or value.dim() or not isinstance(dim, int) or not x.dim():
        return NotImplemented
    filled = torch.zeros(x.shape[dim], dtype=torch.bool, device=x.device).index_fill(0, index, True)
    return torch.where(filled.reshape(-1, *[1] * (x.dim() - 1 - dim % x.dim())), value.to(x.dtype), x)


def index_fill_(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    """`index_fill`, in place."""
    filled = index_fill(x, dim, index, value)
    return filled if filled is NotImplemented else x.copy_(filled)


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.ctc_loss: ctc_loss,
    F.gaussian_nll_loss: gaussian_nll_loss,
    F.multilabel_margin_loss: multilabel_margin_loss,
    torch.index_fill: index_fill,
    Tensor.index_fill: index_fill,
    Tensor.index_fill_: index_fill_,
}
