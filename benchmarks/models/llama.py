# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A Llama: RMS norm, rotary positions, grouped-query attention, SwiGLU. After "Llama 2: Open Foundation and Fine-Tuned
Chat Models" (Touvron et al., 2023)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.case import Case, Entry, identity
from models.gpt import next_tokens


def rotary_angles(tokens: int, size: int) -> Tensor:
    """Angle of each pair of a head's elements at each place: f32 [tokens, size / 2]."""
    frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
    return torch.outer(torch.arange(tokens).float(), frequencies)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """``x`` [batch, heads, tokens, size], its two halves rotated by angles [tokens, size / 2]; in f32, as trained."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention on [batch, tokens, width] in which each head of keys and values serves several of queries."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.query = nn.Linear(width, heads * self.size, bias=False)
        self.key = nn.Linear(width, key_heads * self.size, bias=False)
        self.value = nn.Linear(width, key_heads * self.size, bias=False)
        self.project = nn.Linear(heads * self.size, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.query, self.key, self.value))
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.project(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """A gated feed-forward network: [..., width] to the same. After "GLU Variants Improve Transformer" (Shazeer,
    2020)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """Attention and SwiGLU, each on an RMS norm and with a residual: [batch, tokens, width] to the same."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, key_heads)
        self.feed_forward = SwiGLU(width, 8 * width // 3)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cosine, sine)
        return x + self.feed_forward(self.norm2(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """(tokens, targets), int64 [batch, tokens], to the mean cross entropy."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, vocabulary: int, tokens: int, width: int, heads: int, key_heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, key_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        angles = rotary_angles(tokens, width // heads)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosine[:length], self.sine[:length])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def llama(batch: int, tokens: int, width: int, heads: int, key_heads: int, layers: int, vocabulary: int) -> Case:
    model = Llama(vocabulary, tokens, width, heads, key_heads, layers)
    return Case(model, next_tokens(batch, tokens, vocabulary), identity)


ENTRIES = (
    Entry(
        "llama",
        llama,
        {
            "test": {"batch": 2, "tokens": 5, "width": 16, "heads": 4, "key_heads": 2, "layers": 1, "vocabulary": 11},
            "bench": {
                "batch": 1,
                "tokens": 256,
                "width": 512,
                "heads": 8,
                "key_heads": 2,
                "layers": 8,
                "vocabulary": 32000,
            },
        },
    ),
)
