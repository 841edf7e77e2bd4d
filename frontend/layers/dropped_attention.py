# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention with dropout as an op, whose gradients draw the numbers again that the forward drew.

``retrograd::attention`` takes a seed and the number of a stream, as ``retrograd::uniform`` does: of B x H x L x S
numbers, a weight is left out where its own is less than the chance, which is what ``dropout`` of the matrix of weights
would draw from that stream. The functions here are what eager runs; kernels of our own compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
)
from retrograd.frontend.decompositions.sums import computed
from retrograd.frontend.layers.own_ops import define_op
from retrograd.frontend.layers.random_ops import draw_part

# At a time.
_MOST_SCORES = 1 << 22


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
    found = []
    for part in _divide(query, key, value, mask):
        weights, lse = softmax_sums(attention_scores(part.q, part.k, causal, part.mask, scale))
        kept = _kept(part, dropout, seed, stream)
        found.append((torch.matmul(weights * kept, part.v).to(query.dtype), lse.squeeze(-1)))
    output, sums = _join(found, query)
    return output, sums


def attention_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    dq, dk, dv = _find_gradients(*given, of_scores=False)
    return dq, dk, dv


def attention_backward_with_mask(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, and of the scores ``[B, H, L, S]`` in the mask's type, whose sums are the
    mask's."""
    dq, dk, dv, of_scores = _find_gradients(*given, of_scores=True)
    return dq, dk, dv, of_scores


def _find_gradients(
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
    *,
    of_scores: bool,
) -> list[Tensor]:
    """Gradients of query, key and value, and of the scores, in the type of the mask, if they are wanted."""
    found = []
    for part in _divide(query, key, value, mask):
        g, o, lse = (computed(part.take(tensor)) for tensor in (grad, out, logsumexp))
        scores = attention_scores(part.q, part.k, causal, part.mask, scale)
        changes, used = score_changes(scores, (g, part.v, o), lse, _kept(part, dropout, seed, stream))
        own = spread_changes(changes, used, (g, part.q, part.k), scale)
        found.append((*own, changes.to(mask.dtype)) if of_scores and mask is not None else own)
    dq, dk, dv, *rest = _join(found, query)
    repeats = query.shape[1] // key.shape[1]
    return [
        dq.to(query.dtype),
        summed_heads(dk, repeats).to(key.dtype),
        summed_heads(dv, repeats).to(value.dtype),
        *rest,
    ]


@dataclass(frozen=True)
class _Part:
    """Heads ``first`` to ``last`` of one of a batch of ``count`` heads each, each with keys and values of its own."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    batch: int
    first: int
    last: int
    count: int

    def take(self, tensor: Tensor) -> Tensor:
        """The same part of a tensor ``[B, H, ...]``."""
        return tensor[self.batch : self.batch + 1, self.first : self.last]


def _divide(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Iterator[_Part]:
    """Heads in parts whose scores are no more than some millions: memory is taken for one part at a time."""
    batch, heads, rows, _ = query.shape
    columns, repeats = key.shape[2], heads // key.shape[1]
    step = min(heads, max(1, _MOST_SCORES // (rows * columns)))
    added = None if mask is None else mask.expand(batch, heads, rows, columns)
    for own in range(batch):
        for first in range(0, heads, step):
            last = min(heads, first + step)
            q = computed(query[own : own + 1, first:last])
            k, v = (computed(all_heads(t[own : own + 1], repeats)[:, first:last]) for t in (key, value))
            part = None if added is None else added[own : own + 1, first:last]
            yield _Part(q, k, v, part, own, first, last, heads)


def _join(found: Sequence[Sequence[Tensor]], query: Tensor) -> list[Tensor]:
    """Join each result of all parts to ``[B, H, ...]``."""
    joined = [torch.cat([tensor[0] for tensor in tensors]) for tensors in zip(*found, strict=True)]
    return [tensor.reshape(query.shape[:2] + tensor.shape[1:]) for tensor in joined]


def _kept(part: _Part, dropout: float, seed: Tensor, stream: int) -> Tensor:
    """The factors of the weights of a part: 0, or one over the chance that they stay."""
    shape = (1, part.last - part.first, part.q.shape[2], part.k.shape[2])
    size = shape[2] * shape[3]
    start = (part.batch * part.count + part.first) * size
    numbers = draw_part(seed.to(part.q.device), stream, start, shape[1] * size).reshape(shape)
    return (numbers >= on_grid(dropout)).to(part.q.dtype) / (1 - dropout)


def _fake(query: Tensor, _key: Tensor, _value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    sums = torch.float64 if query.dtype is torch.float64 else torch.float32
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=sums)


def _fake_backward(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _fake_backward_with_mask(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *given: Any) -> Any:
    *_, mask, _scale, _seed, _stream = given
    return *_fake_backward(grad, query, key, value), mask.new_empty((*query.shape[:3], key.shape[2]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, dropout, causal, mask, scale, seed, stream = inputs
    ctx.save_for_backward(query, key, value, *output, mask, seed)
    ctx.how = dropout, causal, scale, stream
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, out, lse, mask, seed = ctx.saved_tensors
    dropout, causal, scale, stream = ctx.how
    given = (grad, query, key, value, out, lse, dropout, causal, mask, scale, seed, stream)
    if not ctx.needs_input_grad[5]:
        return (*ATTENTION_BACKWARD(*given), *[None] * 6)
    *found, changes = ATTENTION_BACKWARD_WITH_MASK(*given)
    return (*found, None, None, changes.sum_to_size(mask.shape), *[None] * 3)


_GIVEN = "Tensor query, Tensor key, Tensor value"
_HOW = "float dropout, bool causal, Tensor? mask, float? scale, Tensor seed, int stream"
ATTENTION = define_op(f"attention({_GIVEN}, {_HOW}) -> (Tensor, Tensor)", attention, _fake, _differentiate, _save)
_GIVEN = f"Tensor grad, {_GIVEN}, Tensor out, Tensor logsumexp"
ATTENTION_BACKWARD = define_op(
    f"attention_backward({_GIVEN}, {_HOW}) -> (Tensor, Tensor, Tensor)", attention_backward, _fake_backward
)
ATTENTION_BACKWARD_WITH_MASK = define_op(
    f"attention_backward_with_mask({_GIVEN}, {_HOW.replace('?', '', 1)}) -> (Tensor, Tensor, Tensor, Tensor)",
    attention_backward_with_mask,
    _fake_backward_with_mask,
)
