# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An encoder-decoder with relative position bias. After "Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer" (Raffel et al., 2020)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.case import Case, Entry, identity

BUCKETS, FARTHEST = 8, 32


def bucket_of_distance(distance: Tensor, *, both_ways: bool) -> Tensor:
    """The number, under ``BUCKETS``, of the bucket for each distance (int64): one each when near, wider ones up to
    ``FARTHEST``; with ``both_ways`` half of the buckets are for places that follow."""
    buckets, offset = BUCKETS, torch.zeros_like(distance)
    if both_ways:
        buckets //= 2
        offset = torch.where(distance > 0, buckets, 0)
        distance = distance.abs()
    else:
        distance = (-distance).clamp_min(0)
    near = buckets // 2
    scale = (buckets - near) / math.log(FARTHEST / near)
    far = near + (torch.log(distance.clamp_min(1).float() / near) * scale).long()
    return offset + torch.where(distance < near, distance, far.clamp_max(buckets - 1))


class RelativeBias(nn.Module):
    """A learned bias per head and distance: [1, heads, queries, keys]."""

    def __init__(self, heads: int, *, both_ways: bool) -> None:
        super().__init__()
        self.both_ways = both_ways
        self.table = nn.Embedding(BUCKETS, heads)

    def forward(self, queries: int, keys: int) -> Tensor:
        device = self.table.weight.device
        distance = torch.arange(keys, device=device)[None] - torch.arange(queries, device=device)[:, None]
        bias: Tensor = self.table(bucket_of_distance(distance, both_ways=self.both_ways))
        return bias.permute(2, 0, 1).unsqueeze(0)


class Attention(nn.Module):
    """Attention of [batch, queries, width] to [batch, keys, width], unscaled as in T5, with a bias on its scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.project = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (p(memory).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.project(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention to itself, to the encoder's output if there is one, and a feed-forward network."""

    def __init__(self, width: int, heads: int, *, cross: bool) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.cross = Attention(width, heads) if cross else None
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(3 if cross else 2))
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.ReLU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, bias)
        if self.cross is not None and memory is not None:
            x = x + self.cross(self.norms[1](x), memory, None)
        return x + self.feed_forward(self.norms[-1](x))  # type: ignore[no-any-return]


class T5(nn.Module):
    """(source, target), int64 [batch, source length] and [batch, target length + 1], to the mean cross entropy."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(Layer(width, heads, cross=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(width, heads, cross=True) for _ in range(layers))
        self.encoder_bias = RelativeBias(heads, both_ways=True)
        self.decoder_bias = RelativeBias(heads, both_ways=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(2))
        # The scores are not divided by the root of the width; the weights are smaller instead.
        for layer in (*self.encoder, *self.decoder):
            for part in layer.modules():
                if isinstance(part, Attention):
                    nn.init.normal_(part.query.weight, std=1 / width)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, bias = self.embedding(source), self.encoder_bias(source.shape[1], source.shape[1])
        for layer in self.encoder:
            memory = layer(memory, bias)
        memory = self.norms[0](memory)
        length = target.shape[1] - 1
        future = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        bias = self.decoder_bias(length, length).masked_fill(future, -torch.inf)
        x = self.embedding(target[:, :-1])
        for layer in self.decoder:
            x = layer(x, bias, memory)
        logits = F.linear(self.norms[1](x), self.embedding.weight) / x.shape[-1] ** 0.5
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def t5(batch: int, source: int, target: int, width: int, heads: int, layers: int, vocabulary: int) -> Case:
    text = torch.randint(vocabulary, (batch, source)), torch.randint(vocabulary, (batch, target + 1))
    return Case(T5(vocabulary, width, heads, layers), text, identity)


ENTRIES = (
    Entry(
        "t5",
        t5,
        {
            "test": {"batch": 2, "source": 5, "target": 4, "width": 8, "heads": 2, "layers": 1, "vocabulary": 11},
            "bench": {
                "batch": 2,
                "source": 128,
                "target": 128,
                "width": 512,
                "heads": 8,
                "layers": 4,
                "vocabulary": 32128,
            },
        },
    ),
)
