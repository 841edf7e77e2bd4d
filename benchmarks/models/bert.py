# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Masked language modelling on padded text. After "BERT: Pre-training of Deep Bidirectional Transformers" (Devlin et
al., 2018)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.case import Case, Entry, identity

PADDING, UNSCORED = 0, -100


class EncoderLayer(nn.Module):
    """Attention to what is not padding, then a feed-forward network, each with a norm after its residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, is_text: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=is_text[:, None, None, :])
        x = self.norm1(x + self.project(attended.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.feed_forward(x))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """(tokens, segments, labels), int64 [batch, tokens], to the mean cross entropy of the places that have a label."""

    def __init__(self, vocabulary: int, tokens: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.segment = nn.Embedding(2, width)
        self.position = nn.Embedding(tokens, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU("tanh"), nn.LayerNorm(width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, segments: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.embedding(tokens) + self.segment(segments) + self.position(places))
        is_text = tokens != PADDING
        for layer in self.layers:
            x = layer(x, is_text)
        logits = self.head(self.transform(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=UNSCORED)


def bert(batch: int, tokens: int, width: int, heads: int, layers: int, vocabulary: int) -> Case:
    text = torch.randint(1, vocabulary, (batch, tokens))
    places, lengths = torch.arange(tokens), torch.linspace(tokens, tokens // 2, batch).long()
    text = torch.where(places < lengths[:, None], text, PADDING)
    segments = (places >= tokens // 3).long().repeat(batch, 1)
    labels = torch.where((text != PADDING) & (places % 3 == 0), text, UNSCORED)
    return Case(Bert(vocabulary, tokens, width, heads, layers), (text, segments, labels), identity)


ENTRIES = (
    Entry(
        "bert",
        bert,
        {
            "test": {"batch": 2, "tokens": 6, "width": 8, "heads": 2, "layers": 1, "vocabulary": 11},
            "bench": {"batch": 2, "tokens": 128, "width": 768, "heads": 12, "layers": 12, "vocabulary": 30522},
        },
    ),
)
