# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""ResNet-18 and ResNet-50. After "Deep Residual Learning for Image Recognition" (He et al., 2015)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.case import Case, Entry


class BasicBlock(nn.Module):
    """Two convolutions with a residual: [batch, inputs, H, W] to [batch, outputs, H / stride, W / stride]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """A convolution 3 x 3 on a quarter of the channels, between two of 1 x 1, with a residual: [batch, inputs, H, W] to
    [batch, outputs, H / stride, W / stride]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        inner = outputs // 4
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True)),
            *(nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True)),
            *(nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [batch, 3, H, W] to logits [batch, classes]; ``depths`` are the blocks of each stage, the first of which
    has ``width`` channels, each further one twice those of the last; of a ``bottleneck`` four times as many go out."""

    def __init__(self, depths: Sequence[int], width: int, classes: int, bottleneck: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        inputs = width
        for i, depth in enumerate(depths):
            for j in range(depth):
                outputs, stride = (width << i) * (4 if bottleneck else 1), 2 if i > 0 and j == 0 else 1
                blocks.append((Bottleneck if bottleneck else BasicBlock)(inputs, outputs, stride))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))  # type: ignore[no-any-return]


def resnet(batch: int, stages: int, blocks: int, width: int, image: int, classes: int) -> Case:
    labels = torch.randint(classes, (batch,))
    model = ResNet([blocks] * stages, width, classes)
    return Case(model, (torch.randn(batch, 3, image, image),), lambda y: F.cross_entropy(y, labels))


def resnet50(batch: int, image: int, classes: int) -> Case:
    """ResNet-50 on square images."""
    labels = torch.randint(classes, (batch,))
    model = ResNet([3, 4, 6, 3], 64, classes, bottleneck=True)
    return Case(model, (torch.randn(batch, 3, image, image),), lambda logits: F.cross_entropy(logits, labels))


ENTRIES = (
    Entry(
        "resnet18",
        resnet,
        {
            "test": {"batch": 4, "stages": 2, "blocks": 1, "width": 4, "image": 32, "classes": 5},
            "bench": {"batch": 8, "stages": 4, "blocks": 2, "width": 64, "image": 128, "classes": 1000},
        },
    ),
)
