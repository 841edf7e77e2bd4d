# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Vision transformer. After "An Image is Worth 16x16 Words" (Dosovitskiy et al., 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.case import Case, Entry
from models.transformer import TransformerBlock


class VisionTransformer(nn.Module):
    """Images [batch, 3, image, image], cut into patches of ``patch`` by ``patch``, to logits [batch, classes]."""

    def __init__(self, image: int, patch: int, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(patches), -1, -1), patches], dim=1) + self.position
        return self.head(self.norm(self.blocks(tokens)[:, 0]))  # type: ignore[no-any-return]


def vit(batch: int, image: int, patch: int, width: int, heads: int, layers: int, classes: int) -> Case:
    labels = torch.randint(classes, (batch,))
    model = VisionTransformer(image, patch, width, heads, layers, classes)
    return Case(model, (torch.randn(batch, 3, image, image),), lambda y: F.cross_entropy(y, labels))


ENTRIES = (
    Entry(
        "vit",
        vit,
        {
            "test": {"batch": 2, "image": 8, "patch": 4, "width": 12, "heads": 3, "layers": 1, "classes": 5},
            "bench": {"batch": 4, "image": 224, "patch": 16, "width": 192, "heads": 3, "layers": 12, "classes": 1000},
        },
    ),
)
