# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention with dropout as an op, whose gradients draw the numbers again that the forward drew.

``retrograd::attention`` takes a seed and the number of a stream, as ``retrograd::uniform`` does: of B x H x L x S
numbers, a weight is left out where its own is less than the chance, which is what ``dropout`` of the matrix of weights
would draw from that stream. The functions here are what eager runs; kernels of our own compute the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.attention import (
    all_heads,
    attention_scores,
    score_scale,
    softmax_sums,
    summed_heads,
)
from retrograd.frontend.layers.random_ops import uniform

_LIBRARY = torch.library.Library("retrograd", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, float dropout, bool causal, Tensor? mask, float? scale,"
    " Tensor seed, int stream) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
    " float dropout, bool causal, Tensor? mask, float? scale, Tensor seed, int stream) -> (Tensor, Tensor, Tensor)"
)


def on_grid(chance: float) -> float:
    """A chance as a multiple of 2**-24, as the numbers are that are compared with it."""
    return round(chance * 2**24) / 2**24


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
    seed: Tensor,
    stream: int,
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, L, D]`` and the log-sum-exps ``[B, H, L]`` of the scores, none of which is left out; ``key`` and
    ``value`` are ``[B, H / repeats, S, D]``."""
    scores, (_, _, v) = _prepare(query, key, value, causal, mask, scale)
    weights, lse = softmax_sums(scores)
    return torch.matmul(weights * _kept(weights, dropout, seed, stream), v).to(query.dtype), lse.squeeze(-1)


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout: float,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
    seed: Tensor,
    stream: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    repeats = query.shape[1] // key.shape[1]
    scores, (q, k, v) = _prepare(query, key, value, causal, mask, scale)
    g, o = _wide(grad), _wide(out)
    weights = torch.exp(scores - logsumexp.to(q.dtype).unsqueeze(-1))
    kept = _kept(weights, dropout, seed, stream)
    change = weights * (torch.matmul(g, v.transpose(-1, -2)) * kept - (g * o).sum(-1, keepdim=True))
    change = change * score_scale(q, scale)
    found = (
        torch.matmul(change, k),
        summed_heads(torch.matmul(change.transpose(-1, -2), q), repeats),
        summed_heads(torch.matmul((weights * kept).transpose(-1, -2), g), repeats),
    )
    dq, dk, dv = (gradient.to(own.dtype) for gradient, own in zip(found, (query, key, value), strict=True))
    return dq, dk, dv


def _prepare(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    repeats = query.shape[1] // key.shape[1]
    q, k, v = _wide(query), all_heads(_wide(key), repeats), all_heads(_wide(value), repeats)
    return attention_scores(q, k, causal, mask, scale), (q, k, v)


def _kept(weights: Tensor, dropout: float, seed: Tensor, stream: int) -> Tensor:
    """What weights are times: nothing, or one over the chance that they stay."""
    numbers = uniform(seed.to(weights.device), stream, weights.shape)
    return (numbers >= on_grid(dropout)).to(weights.dtype) / (1 - dropout)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _fake(query: Tensor, _key: Tensor, _value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    sums = torch.float64 if query.dtype is torch.float64 else torch.float32
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=sums)


def _fake_backward(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, dropout, causal, mask, scale, seed, stream = inputs
    ctx.save_for_backward(query, key, value, *output, mask, seed)
    ctx.how = dropout, causal, scale, stream
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, out, lse, mask, seed = ctx.saved_tensors
    dropout, causal, scale, stream = ctx.how
    given = (grad, query, key, value, out, lse, dropout, causal, mask, scale, seed, stream)
    return (*ATTENTION_BACKWARD(*given), *[None] * 6)


_LIBRARY.impl("attention", attention, "CompositeExplicitAutograd")
_LIBRARY.impl("attention_backward", attention_backward, "CompositeExplicitAutograd")
torch.library.register_fake("retrograd::attention", _fake, lib=_LIBRARY)
torch.library.register_fake("retrograd::attention_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("retrograd::attention", _differentiate, setup_context=_save, lib=_LIBRARY)

ATTENTION = torch.ops.retrograd.attention.default
ATTENTION_BACKWARD = torch.ops.retrograd.attention_backward.default
