# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Dilated causal convolutions over sound. After "WaveNet: A Generative Model for Raw Audio" (van den Oord et al.,
2016)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from models.case import Case, Entry


class GatedLayer(nn.Module):
    """A gated, dilated convolution: [batch, channels, time] to what goes on and what is skipped, of the same shape."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.gated = weight_norm(nn.Conv1d(channels, 2 * channels, 2, dilation=dilation))
        self.out = nn.Conv1d(channels, channels, 1)
        self.skip = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        signal, gate = self.gated(F.pad(x, (self.dilation, 0))).chunk(2, dim=1)
        y = torch.tanh(signal) * torch.sigmoid(gate)
        return x + self.out(y), self.skip(y)


class WaveNet(nn.Module):
    """Quantized samples, int64 [batch, time], to logits of each next sample [batch, levels, time]."""

    def __init__(self, levels: int, channels: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(levels, channels)
        self.layers = nn.ModuleList(GatedLayer(channels, 1 << i) for i in range(layers))
        self.head = nn.Sequential(
            nn.ReLU(), nn.Conv1d(channels, channels, 1), nn.ReLU(), nn.Conv1d(channels, levels, 1)
        )

    def forward(self, samples: Tensor) -> Tensor:
        x = self.embedding(samples).transpose(1, 2)
        skipped = torch.zeros_like(x)
        for layer in self.layers:
            x, skip = layer(x)
            skipped = skipped + skip
        return self.head(skipped)  # type: ignore[no-any-return]


def wavenet(batch: int, time: int, levels: int, channels: int, layers: int) -> Case:
    sound = torch.randint(levels, (batch, time + 1))
    model = WaveNet(levels, channels, layers)
    # The last layer's output goes nowhere: only what it skips is used.
    model.layers[-1].out.requires_grad_(False)
    return Case(model, (sound[:, :-1].contiguous(),), lambda logits: F.cross_entropy(logits, sound[:, 1:]))


ENTRIES = (
    Entry(
        "wavenet",
        wavenet,
        {
            "test": {"batch": 2, "time": 8, "levels": 7, "channels": 4, "layers": 2},
            "bench": {"batch": 4, "time": 2048, "levels": 256, "channels": 64, "layers": 10},
        },
    ),
)
