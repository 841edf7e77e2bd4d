# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Dense layers: a linear regression and a multi-layer perceptron."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from models.case import Case, Entry


def linear_regression(batch: int, features: int) -> Case:
    target = torch.randn(batch, 1)
    return Case(nn.Linear(features, 1), (torch.randn(batch, features),), lambda y: F.mse_loss(y, target))


def mlp(batch: int, features: int, hidden: int, classes: int) -> Case:
    labels = torch.randint(classes, (batch,))
    model = nn.Sequential(
        nn.Linear(features, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.GELU(),
        nn.LayerNorm(hidden),
        nn.Linear(hidden, classes),
    )
    return Case(model, (torch.randn(batch, features),), lambda y: F.cross_entropy(y, labels))


ENTRIES = (
    Entry(
        "linear_regression",
        linear_regression,
        {"test": {"batch": 16, "features": 5}, "bench": {"batch": 16384, "features": 2048}},
    ),
    Entry(
        "mlp",
        mlp,
        {
            "test": {"batch": 8, "features": 12, "hidden": 16, "classes": 4},
            "bench": {"batch": 256, "features": 784, "hidden": 1024, "classes": 10},
        },
    ),
)
