# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scaled dot product attention as PyTorch's CPU flash kernel computes it, forward and backward.

The kernel's second output is the log-sum-exp of each row of scores, which its backward reads; PyTorch's own
decomposition gives the attention weights in its place, and the backward is then wrong. After
``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.decompositions.sums import computed

aten = torch.ops.aten


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, L, D]`` of the query's type and log-sum-exp ``[B, H, L]`` (f32 for half types), in the kernel's
    layouts.

    ``key`` and ``value`` are ``[B, H / repeats, S, D]``. A row with every position masked gives zeros. Raises
    ``NotImplementedError`` for dropout.
    """
    _refuse_dropout(dropout_p, "aten._scaled_dot_product_flash_attention_for_cpu")
    repeats = query.shape[1] // key.shape[1]
    q, k, v = computed(query), all_heads(computed(key), repeats), all_heads(computed(value), repeats)
    weights, lse = softmax_sums(attention_scores(q, k, is_causal, attn_mask, scale))
    output = torch.matmul(weights, v).to(query.dtype)
    return laid_out_like(output, query), swapped_layout(lse.squeeze(-1))


def flash_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, each of its own shape and type; raises ``NotImplementedError`` for dropout."""
    _refuse_dropout(dropout_p, "aten._scaled_dot_product_flash_attention_for_cpu_backward")
    repeats = query.shape[1] // key.shape[1]
    g, q, o = computed(grad), computed(query), computed(out)
    k, v = all_heads(computed(key), repeats), all_heads(computed(value), repeats)
    scores = attention_scores(q, k, is_causal, attn_mask, scale)
    changes, weights = score_changes(scores, (g, v, o), logsumexp)
    dq, dk, dv = spread_changes(changes, weights, (g, q, k), scale)
    return (
        swapped_layout(dq.to(query.dtype)),
        swapped_layout(summed_heads(dk, repeats).to(key.dtype)),
        swapped_layout(summed_heads(dv, repeats).to(value.dtype)),
    )


def attention_scores(q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    """The scores of queries and keys of as many heads, minus infinity where none counts."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * score_scale(q, scale)
    if mask is not None:
        scores = scores + mask.to(scores.dtype)
    if is_causal:
        rows, columns = (torch.arange(n, device=q.device) for n in (q.shape[-2], k.shape[-2]))
        scores = torch.where(columns.unsqueeze(0) <= rows.unsqueeze(1), scores, -math.inf)
    return scores


def softmax_sums(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax of rows, zeros where nothing counts, and the log-sum-exp of each, 0 there."""
    highest = scores.amax(-1, keepdim=True)
    highest = torch.where(highest == -math.inf, 0.0, highest)
    exponentials = torch.exp(scores - highest)
    total = exponentials.sum(-1, keepdim=True)
    total = torch.where(total == 0, 1.0, total)
    return exponentials / total, highest + torch.log(total)


def score_changes(
    scores: Tensor, tensors: tuple[Tensor, Tensor, Tensor], logsumexp: Tensor, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient of ``scores``, and the weights that values were times; of the gradient of the output, values and the
    output in ``tensors``. Weights were times ``kept``, if given, behind the softmax."""
    g, v, o = tensors
    weights = torch.exp(scores - logsumexp.to(g.dtype).unsqueeze(-1))
    grad_weights = torch.matmul(g, v.transpose(-1, -2))
    used = weights
    if kept is not None:
        grad_weights, used = grad_weights * kept, weights * kept
    return weights * (grad_weights - (g * o).sum(-1, keepdim=True)), used


def spread_changes(
    changes: Tensor, used: Tensor, tensors: tuple[Tensor, Tensor, Tensor], scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values of as many heads, from what :func:`score_changes` gives and from
    ``tensors``: the gradient of the output, queries and keys."""
    g, q, k = tensors
    change = changes * score_scale(q, scale)
    dk, dv = torch.matmul(change.transpose(-1, -2), q), torch.matmul(used.transpose(-1, -2), g)
    return torch.matmul(change, k), dk, dv


def score_scale(q: Tensor, scale: float | None) -> float:
    """Return the factor of the scores: ``scale`` if given, else one over the root of a head's width."""
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def all_heads(x: Tensor, repeats: int) -> Tensor:
    """Grouped query attention: each key head serves ``repeats`` query heads in a row."""
    return x if repeats == 1 else x.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2)


def summed_heads(x: Tensor, repeats: int) -> Tensor:
    """The gradient of a key or value out of those of the query heads that it serves, ``repeats`` in a row."""
    return x if repeats == 1 else x.unflatten(1, (-1, repeats)).sum(2)


def laid_out_like(x: Tensor, query: Tensor) -> Tensor:
    """The kernel allocates its output in the query's order of axes, and the model's own views count on that."""
    order = sorted(range(x.dim()), key=query.stride, reverse=True)
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(x.dim())])


def swapped_layout(x: Tensor) -> Tensor:
    """``x`` with axes 1 and 2 swapped in memory, as kernels allocate log-sum-exps and gradients, and those of CUDA that
    need little memory their output."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _refuse_dropout(dropout_p: float, op: str) -> None:
    if dropout_p > 0:
        raise NotImplementedError(
            f"{op}: dropout_p={dropout_p} is not supported, nor is it by PyTorch's CPU kernel; "
            "set dropout_p=0.0, or select SDPBackend.MATH with torch.nn.attention.sdpa_kernel"
        )


ENTRIES = (
    Decomposition(
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        flash_attention,
        "PyTorch's decomposition gives the attention weights where the kernel gives the log-sum-exp",
    ),
    Decomposition(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        flash_attention_backward,
        "neither PyTorch nor torch-mlir decomposes it",
    ),
)
