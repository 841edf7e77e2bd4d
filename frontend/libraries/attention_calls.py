# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Calls of attention in a trace: which of them kernels of our own take, and why the others are decomposed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from retrograd.contract.attention import Attention
from retrograd.contract.tensors import DTYPES

REFUSED = "retrograd_refused"
"""In the ``meta`` of a graph module: lines on calls that are decomposed, and why."""

_ELEMENTS = {getattr(torch, name): element for element, name in DTYPES.items()}
# Of the trace that is made now, where there are kernels.
_REFUSALS: ContextVar[dict[str, None] | None] = ContextVar("retrograd_refusals", default=None)


@contextmanager
def refusing_calls(*, has_kernels: bool) -> Iterator[None]:
    """While this is open, calls that kernels of our own take are kept whole, if there are any, and others noted."""
    token = _REFUSALS.set({} if has_kernels else None)
    try:
        yield
    finally:
        _REFUSALS.reset(token)


def take_call(call: Attention) -> bool:
    """Whether kernels of our own compute a call; notes why they do not."""
    refusals = _REFUSALS.get()
    if refusals is None:
        return False
    obstacle = call.find_obstacle()
    if obstacle is not None:
        query, key = (
            f"tensor<{'x'.join([*('?' if size is None else str(size) for size in shape), element])}>"
            for element, shape in (call.query, call.key)
        )
        refusals[f"attention of {query} and {key}: IREE's code, {obstacle}"] = None
    return obstacle is None


def note_refusals(graph_module: torch.fx.GraphModule) -> None:
    """Write to a graph what was noted while it was traced."""
    graph_module.meta[REFUSED] = tuple(_REFUSALS.get() or ())


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
    q, k, v = (_describe_tensor(tensor) for tensor in (query, key, value))
    return Attention(q, k, v, None if attn_mask is None else _describe_tensor(attn_mask), dropout_p, scale)


def describe_backward(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *given: Any, **how: Any) -> Attention:
    """The same of the CPU's op for its gradients."""
    _out, _lse, dropout_p, causal = given
    return describe(query, key, value, dropout_p, causal, **how)


def _describe_tensor(tensor: Tensor) -> tuple[str, tuple[int | None, ...]]:
    return _ELEMENTS.get(tensor.dtype, ""), tuple(size if isinstance(size, int) else None for size in tensor.shape)
