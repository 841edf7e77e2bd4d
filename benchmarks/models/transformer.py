# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A transformer block, which several models are made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.case import Case, Entry


class TransformerBlock(nn.Module):
    """Attention, then a feed-forward network, each on a layer norm and with a residual: [batch, tokens, width]."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, feed_forward: nn.Module | None = None) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed_forward = feed_forward or nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        return x + self.feed_forward(self.norm2(x))  # type: ignore[no-any-return]

    def attend(self, x: Tensor) -> Tensor:
        """The first half of the block, residual included."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=self.causal)
        return x + self.project(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def transformer(batch: int, tokens: int, width: int, heads: int) -> Case:
    # The input needs a gradient too, as it does in the middle of a network.
    x = torch.randn(batch, tokens, width, requires_grad=True)
    target = torch.randn(batch, tokens, width)
    return Case(TransformerBlock(width, heads), (x,), lambda y: F.mse_loss(y, target))


ENTRIES = (
    Entry(
        "transformer",
        transformer,
        {
            "test": {"batch": 2, "tokens": 6, "width": 16, "heads": 2},
            "bench": {"batch": 8, "tokens": 128, "width": 256, "heads": 4},
        },
    ),
)
