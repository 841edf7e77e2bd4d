# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The block of a diffusion U-Net: group norm, a time embedding, attention over pixels. After "Denoising Diffusion
Probabilistic Models" (Ho et al., 2020)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.case import Case, Entry

GROUPS = 2


def time_embedding(time: Tensor, size: int) -> Tensor:
    """Sines and cosines of the times [batch], f32: [batch, size]."""
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(size // 2, device=time.device) / (size // 2))
    angles = time[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class ResidualBlock(nn.Module):
    """Two convolutions on group norms, the second told the time: [batch, channels, H, W] to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(GROUPS, channels), nn.GroupNorm(GROUPS, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(channels, 2 * channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = self.time(F.silu(time))[:, :, None, None].chunk(2, dim=1)
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.norm2(y) * (1 + scale) + shift
        return x + self.conv2(F.silu(y))  # type: ignore[no-any-return]


class PixelAttention(nn.Module):
    """Attention of each pixel to all: [batch, channels, H, W] to the same."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.project = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).unflatten(1, (3, self.heads, -1)).transpose(-1, -2).unbind(1)
        attended = F.scaled_dot_product_attention(q, k, v)
        return x + self.project(attended.transpose(-1, -2).reshape(x.shape))  # type: ignore[no-any-return]


class DiffusionBlock(nn.Module):
    """Down, a residual block with attention, and up again: (noisy [batch, 3, H, W], time [batch]) to the noise."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.channels = channels
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.block = ResidualBlock(channels)
        self.attention = PixelAttention(channels, heads)
        self.up = nn.Conv2d(channels, channels, 3, padding=1)
        self.head = nn.Conv2d(2 * channels, 3, 1)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        skipped = self.stem(noisy)
        x = self.block(self.down(skipped), time_embedding(time, self.channels).to(noisy.dtype))
        x = self.up(F.interpolate(self.attention(x), scale_factor=2, mode="nearest"))
        return self.head(torch.cat([x, skipped], dim=1))  # type: ignore[no-any-return]


def diffusion(batch: int, channels: int, heads: int, image: int) -> Case:
    noisy, noise = torch.randn(batch, 3, image, image), torch.randn(batch, 3, image, image)
    model = DiffusionBlock(channels, heads)
    return Case(model, (noisy, torch.rand(batch) * 1000), lambda y: F.mse_loss(y, noise))


ENTRIES = (
    Entry(
        "diffusion",
        diffusion,
        {
            "test": {"batch": 2, "channels": 4, "heads": 2, "image": 8},
            "bench": {"batch": 8, "channels": 64, "heads": 4, "image": 32},
        },
    ),
)
