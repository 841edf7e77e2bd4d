# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""MobileNet: inverted residuals with depthwise convolutions and squeeze-and-excitation. After "Searching for
MobileNetV3" (Howard et al., 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.case import Case, Entry


class SqueezeExcitation(nn.Module):
    """Scales each channel of [batch, channels, H, W] by a function of all channels' means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, channels // 4, 1)
        self.excite = nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))


class InvertedResidual(nn.Module):
    """Widen, convolve each channel by itself, narrow: [batch, inputs, H, W] to [batch, outputs, H / stride, ...]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.is_residual = stride == 1 and inputs == outputs
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
            nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
            SqueezeExcitation(wide),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.is_residual else y


def mobilenet(batch: int, stages: int, width: int, image: int, classes: int) -> Case:
    labels = torch.randint(classes, (batch,))
    blocks: list[nn.Module] = []
    for i in range(stages):
        blocks += [InvertedResidual(width << i, width << i, 1), InvertedResidual(width << i, width << (i + 1), 2)]
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.Hardswish(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width << stages, classes),
    )
    return Case(model, (torch.randn(batch, 3, image, image),), lambda y: F.cross_entropy(y, labels))


ENTRIES = (
    Entry(
        "mobilenet",
        mobilenet,
        {
            "test": {"batch": 4, "stages": 1, "width": 4, "image": 12, "classes": 5},
            "bench": {"batch": 8, "stages": 4, "width": 16, "image": 128, "classes": 1000},
        },
    ),
)
