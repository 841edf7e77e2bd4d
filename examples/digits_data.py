# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Handwritten digits of 8x8 pixels, and two small networks that read them: [batch, 1, 8, 8] to 10 logits each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

CLASSES = 10
IMAGE = 8


@dataclass(frozen=True)
class Digits:
    """Images, float32 [n, 1, 8, 8] from 0 to 1, and labels, int64 [n]: to train on, and held out."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @staticmethod
    def load(*, held_out: float = 0.2, seed: int = 0) -> Digits:
        """The 1797 digits that come with scikit-learn, shuffled."""
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
        images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)[order]
        labels = torch.from_numpy(digits.target).long()[order]
        cut = int(len(labels) * (1 - held_out))
        return Digits(images[:cut], labels[:cut], images[cut:], labels[cut:])

    def batches(self, size: int, epoch: int) -> list[tuple[Tensor, Tensor]]:
        """Images and labels of one epoch, always ``size`` at a time: the last incomplete batch is left out."""
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(epoch))
        whole = order[: len(order) // size * size].split(size)
        return [(self.images[rows], self.labels[rows]) for rows in whole]


class ConvNet(nn.Sequential):
    """Two convolutions with batch normalization and pooling, then a linear classifier."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * (IMAGE // 4) ** 2, CLASSES),
        )


class RowTransformer(nn.Module):
    """One block of attention over the eight rows of the image, then a linear classifier on their mean."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(IMAGE, width)
        self.position = nn.Parameter(0.02 * torch.randn(IMAGE, width))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.squeeze(1)) + self.position
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.feed_forward(self.norm2(x))
        return self.head(self.norm3(x).mean(dim=1))  # type: ignore[no-any-return]
