# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""U-Net for segmentation. After "U-Net: Convolutional Networks for Biomedical Image Segmentation" (Ronneberger et al.,
2015)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.case import Case, Entry


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3x3 convolutions, each with batch norm and rectifier: [batch, inputs, H, W] to [batch, outputs, H, W]."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Images [batch, 3, H, W] to logits per pixel [batch, classes, H, W]; H and W are multiples of 2**depth."""

    def __init__(self, depth: int, width: int, classes: int) -> None:
        super().__init__()
        channels = [width << i for i in range(depth + 1)]
        self.down = nn.ModuleList(double_convolution(i, o) for i, o in zip([3, *channels], channels, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, stride=2) for c in reversed(channels[:-1]))
        self.merge = nn.ModuleList(double_convolution(2 * c, c) for c in reversed(channels[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        x, skipped = images, []
        for i, down in enumerate(self.down):
            x = down(x if i == 0 else F.max_pool2d(x, 2))
            skipped.append(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skipped[:-1]), strict=True):
            x = merge(torch.cat([skip, up(x)], dim=1))
        return self.head(x)  # type: ignore[no-any-return]


def unet(batch: int, depth: int, width: int, image: int, classes: int) -> Case:
    labels = torch.randint(classes, (batch, image, image))
    model = UNet(depth, width, classes)
    return Case(model, (torch.randn(batch, 3, image, image),), lambda y: F.cross_entropy(y, labels))


ENTRIES = (
    Entry(
        "unet",
        unet,
        {
            "test": {"batch": 2, "depth": 1, "width": 4, "image": 8, "classes": 3},
            "bench": {"batch": 4, "depth": 3, "width": 32, "image": 96, "classes": 8},
        },
    ),
)
