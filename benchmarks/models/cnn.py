# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A plain convolutional network: strides, batch norm and each kind of pooling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from models.case import Case, Entry


def stage(inputs: int, outputs: int, *, stride: int = 1) -> list[nn.Module]:
    """Convolution, batch norm, rectifier: [batch, inputs, H, W] to [batch, outputs, H / stride, W / stride]."""
    return [
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    ]


def cnn(batch: int, channels: int, image: int, classes: int) -> Case:
    labels = torch.randint(classes, (batch,))
    model = nn.Sequential(
        *stage(3, channels),
        nn.MaxPool2d(2),
        *stage(channels, 2 * channels),
        nn.AvgPool2d(2),
        *stage(2 * channels, 2 * channels, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, classes),
    )
    return Case(model, (torch.randn(batch, 3, image, image),), lambda y: F.cross_entropy(y, labels))


ENTRIES = (
    Entry(
        "cnn",
        cnn,
        {
            "test": {"batch": 4, "channels": 4, "image": 8, "classes": 5},
            "bench": {"batch": 32, "channels": 32, "image": 32, "classes": 10},
        },
    ),
)
