# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""GPT-2 with a tied head. After "Language Models are Unsupervised Multitask Learners" (Radford et al., 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.case import Case, Entry, identity
from models.transformer import TransformerBlock


class LanguageModel(nn.Module):
    """A GPT whose head is its embedding: (tokens, targets), int64 [batch, tokens], to the mean cross entropy."""

    def __init__(self, vocabulary: int, tokens: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.embedding(tokens) + self.position)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def next_tokens(batch: int, tokens: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Random text and, for each place, what follows there; int64 [batch, tokens] each."""
    text = torch.randint(vocabulary, (batch, tokens + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def language_model(batch: int, tokens: int, width: int, heads: int, layers: int, vocabulary: int) -> Case:
    text = next_tokens(batch, tokens, vocabulary)
    return Case(LanguageModel(vocabulary, tokens, width, heads, layers), text, identity)


ENTRIES = (
    Entry(
        "language_model",
        language_model,
        {
            "test": {"batch": 2, "tokens": 6, "width": 16, "heads": 2, "layers": 1, "vocabulary": 11},
            "bench": {"batch": 4, "tokens": 128, "width": 128, "heads": 4, "layers": 4, "vocabulary": 4096},
        },
    ),
    Entry(
        "gpt2",
        language_model,
        {
            "test": {"batch": 2, "tokens": 5, "width": 12, "heads": 3, "layers": 2, "vocabulary": 17},
            "bench": {"batch": 1, "tokens": 256, "width": 768, "heads": 12, "layers": 12, "vocabulary": 50257},
        },
    ),
)
