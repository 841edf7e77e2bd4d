# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention on CUDA tensors, traced as on the CPU: of a call, the log-sum-exp of each row is saved and no matrix of
scores, whatever kernel PyTorch would choose on the card at hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


class PortableAttention(TorchFunctionMode):
    """While it is active, ``scaled_dot_product_attention`` of CUDA tensors is the op that is decomposed for the CPU, or
    PyTorch's own mathematics where the CPU would take these (with dropout, for one)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        query = args[0] if args else (kwargs or {}).get("query")
        if func is F.scaled_dot_product_attention and isinstance(query, Tensor) and query.is_cuda:
            output = _attend(*args, **(kwargs or {}))
            if output is not None:
                return output
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """``None`` where the CPU's op would not be chosen on the CPU either."""
    plain = query.dim() == key.dim() == value.dim() == 4 and dropout_p == 0
    if not plain or (attn_mask is not None and attn_mask.requires_grad) or query.shape[-1] != value.shape[-1]:
        return None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -math.inf)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    output: Tensor = op(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output
