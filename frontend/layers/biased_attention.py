# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention with a bias that has a gradient (learned relative positions), as an op that a library computes on CUDA.

``retrograd::biased_attention`` is ``aten._scaled_dot_product_efficient_attention``, which no other device has. Where no
library computes anything, in a file for one, its formula is compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.attention import (
    all_heads,
    attention_scores,
    score_changes,
    softmax_sums,
    spread_changes,
    summed_heads,
    swapped_layout,
)
from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.decompositions.sums import computed
from retrograd.frontend.layers.own_ops import define_op
from retrograd.frontend.layers.recurrence_ops import written_out_gradients

# Kernels take heads as wide as multiples of it; eager multiplies those of other widths in float32.
_HEAD_STEP = 8


def has_kernels(query: Tensor) -> bool:
    """Whether PyTorch's memory-efficient kernels compute attention of such queries."""
    return query.is_cuda and query.dtype is not torch.float64 and query.shape[-1] % _HEAD_STEP == 0


def biased_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, L, D]`` of the query's type and log-sum-exps ``[B, H, L]`` of the scores (f32 for half types).

    ``key`` and ``value`` are ``[B, H / repeats, S, D]``; ``bias``, which is added to the scores, is expanded to
    ``[B, H, L, S]``.
    """
    repeats = query.shape[1] // key.shape[1]
    q, k, v = computed(query), all_heads(computed(key), repeats), all_heads(computed(value), repeats)
    weights, sums = softmax_sums(attention_scores(q, k, causal, bias, scale))
    return swapped_layout(torch.matmul(weights, v).to(query.dtype)), sums.squeeze(-1)


def biased_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias, each of its own shape and type."""
    repeats = query.shape[1] // key.shape[1]
    g, q, o = computed(grad), computed(query), computed(out)
    k, v = all_heads(computed(key), repeats), all_heads(computed(value), repeats)
    changes, weights = score_changes(attention_scores(q, k, causal, bias, scale), (g, v, o), logsumexp)
    dq, dk, dv = spread_changes(changes, weights, (g, q, k), scale)
    return (
        swapped_layout(dq.to(query.dtype)),
        swapped_layout(summed_heads(dk, repeats).to(key.dtype)),
        swapped_layout(summed_heads(dv, repeats).to(value.dtype)),
        changes.sum_to_size(bias.shape).to(bias.dtype).contiguous(),
    )


def _fake(query: Tensor, _key: Tensor, _value: Tensor, _bias: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    sums = torch.float64 if query.dtype is torch.float64 else torch.float32
    return _empty_swapped(query), query.new_empty(query.shape[:3], dtype=sums)


def _fake_backward(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, *_: Any) -> Any:
    return *(_empty_swapped(tensor) for tensor in (query, key, value)), bias.new_empty(bias.shape)


def _empty_swapped(like: Tensor) -> Tensor:
    batch, heads, rows, width = like.shape
    return like.new_empty((batch, rows, heads, width)).transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        # By the formula, it can be differentiated again.
        def formula(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
            return biased_attention(query, key, value, bias, ctx.causal, ctx.scale)

        return *written_out_gradients(formula, ctx.saved_tensors[:4], (grad,)), None, None
    return *BIASED_ATTENTION_BACKWARD(grad, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None


_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor bias"
BIASED_ATTENTION = define_op(
    f"biased_attention({_GIVEN}, bool causal, float? scale) -> (Tensor, Tensor)",
    biased_attention,
    _fake,
    _differentiate,
    _save,
)
BIASED_ATTENTION_BACKWARD = define_op(
    f"biased_attention_backward(Tensor grad, {_GIVEN}, Tensor out, Tensor logsumexp, bool causal, float? scale)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    biased_attention_backward,
    _fake_backward,
)
_REASON = "it is a library's, which a file has none of"
ENTRIES = (
    Decomposition(BIASED_ATTENTION, biased_attention, _REASON),
    Decomposition(BIASED_ATTENTION_BACKWARD, biased_attention_backward, _REASON),
)
