# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A language model of mixtures of experts, whose router sends each token to few of them. After "Switch Transformers"
(Fedus et al., 2022) and "Mixtral of Experts" (Jiang et al., 2024).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.case import Case, Entry, identity
from models.gpt import next_tokens
from models.transformer import TransformerBlock


class Experts(nn.Module):
    """Feed-forward networks side by side: [experts, places, width] to the same."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.up) @ self.down


class MixtureOfExperts(nn.Module):
    """[tokens, width] to the same, and the auxiliary loss that keeps the experts' loads alike.

    Each expert has places for ``capacity`` tokens; what it is sent beyond these passes by it. Sizes therefore do not
    depend on what the router says.
    """

    def __init__(self, experts: int, chosen: int, width: int, hidden: int, capacity: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, hidden)
        self.count, self.chosen, self.capacity = experts, chosen, capacity

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        odds = self.router(x).float().softmax(-1)
        weights, chosen = odds.topk(self.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        # First choices of all tokens come before second ones.
        sent = F.one_hot(chosen.T.flatten(), self.count)
        place = (sent.cumsum(0) * sent).sum(-1) - 1
        fits = place < self.capacity
        # The last slot is for what does not fit.
        slot = torch.where(fits, chosen.T.flatten() * self.capacity + place, self.count * self.capacity)
        slots = x.new_zeros(self.count * self.capacity + 1, x.shape[-1])
        slots = slots.index_add(0, slot, x.repeat(self.chosen, 1))
        done = self.experts(slots[:-1].unflatten(0, (self.count, self.capacity))).flatten(0, 1)
        given = F.pad(done, (0, 0, 0, 1))[slot] * (weights.T.flatten() * fits).unsqueeze(-1).to(done.dtype)
        share = sent.float().mean(0)
        return given.unflatten(0, (self.chosen, -1)).sum(0), self.count * (share * odds.mean(0)).sum()


class MixtureBlock(nn.Module):
    """A transformer block with a mixture of experts: [batch, tokens, width] to the same, and the auxiliary loss."""

    def __init__(self, heads: int, experts: int, chosen: int, width: int, capacity: int) -> None:
        super().__init__()
        self.block = TransformerBlock(width, heads, causal=True, feed_forward=nn.Identity())
        self.mixture = MixtureOfExperts(experts, chosen, width, 2 * width, capacity)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.block.attend(x)
        mixed, loss = self.mixture(self.block.norm2(x).flatten(0, 1))
        return x + mixed.view_as(x), loss


class MixtureModel(nn.Module):
    """(tokens, targets), int64 [batch, tokens], to the mean cross entropy and a hundredth of the auxiliary losses."""

    def __init__(
        self, vocabulary: int, width: int, heads: int, layers: int, experts: int, chosen: int, capacity: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(MixtureBlock(heads, experts, chosen, width, capacity) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        balance = 0.0
        for block in self.blocks:
            x, loss = block(x)
            balance = balance + loss
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten()) + 0.01 * balance


def mixture_of_experts(
    batch: int, tokens: int, width: int, heads: int, layers: int, experts: int, chosen: int, vocabulary: int
) -> Case:
    # A quarter more places than tokens, if all experts had as many.
    capacity = -(-5 * batch * tokens * chosen // (4 * experts))
    model = MixtureModel(vocabulary, width, heads, layers, experts, chosen, capacity)
    return Case(model, next_tokens(batch, tokens, vocabulary), identity)


ENTRIES = (
    Entry(
        "mixture_of_experts",
        mixture_of_experts,
        {
            "test": {
                "batch": 2,
                "tokens": 6,
                "width": 12,
                "heads": 2,
                "layers": 1,
                "experts": 3,
                "chosen": 2,
                "vocabulary": 11,
            },
            "bench": {
                "batch": 4,
                "tokens": 128,
                "width": 256,
                "heads": 8,
                "layers": 4,
                "experts": 8,
                "chosen": 2,
                "vocabulary": 4096,
            },
        },
    ),
)
