# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Calls of attention in a trace: which of them kernels of our own take."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from retrograd.contract.attention import Attention
from retrograd.frontend.libraries.kernel_calls import describe_tensor, show_tensor, take_call


def take_attention(call: Attention) -> bool:
    """Whether kernels of our own compute a call; notes why they do not."""
    return take_call("attention", call, f"attention of {show_tensor(call.query)} and {show_tensor(call.key)}")


def takes_forward(*args: Any, **kwargs: Any) -> bool:
    """Whether they compute a call of the CPU's op."""
    return take_attention(describe(*args, **kwargs))


def takes_backward(*args: Any, **kwargs: Any) -> bool:
    """Whether they compute a call of the CPU's op for its gradients."""
    return take_attention(describe_backward(*args, **kwargs))


def describe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    _causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Attention:
    """Which call of attention the CPU's op is."""
    q, k, v = (describe_tensor(tensor) for tensor in (query, key, value))
    return Attention(q, k, v, None if attn_mask is None else describe_tensor(attn_mask), dropout_p, scale)


def describe_backward(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *given: Any, **how: Any) -> Attention:
    """The same of the CPU's op for its gradients."""
    _out, _lse, dropout_p, causal = given
    return describe(query, key, value, dropout_p, causal, **how)
