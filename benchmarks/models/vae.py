# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A variational autoencoder. After "Auto-Encoding Variational Bayes" (Kingma and Welling, 2013)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.case import Case, Entry


class VariationalAutoencoder(nn.Module):
    """Images [batch, 1, H, W] in [0, 1] to (logits of their pixels, mean and log variance of the code).

    The code is drawn with ``noise``, [batch, code] of the standard normal distribution; drawn here if not given.
    """

    def __init__(self, image: int, channels: int, code: int) -> None:
        super().__init__()
        small = image // 4
        self.encoder = nn.Sequential(
            nn.Conv2d(1, channels, 4, stride=2, padding=1),
            nn.ELU(),
            nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1),
            nn.ELU(),
            nn.Flatten(),
            nn.Linear(2 * channels * small * small, 2 * code),
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, 2 * channels * small * small),
            nn.ELU(),
            nn.Unflatten(1, (2 * channels, small, small)),
            nn.ConvTranspose2d(2 * channels, channels, 4, stride=2, padding=1),
            nn.ELU(),
            nn.ConvTranspose2d(channels, 1, 4, stride=2, padding=1),
        )

    def forward(self, images: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        noise = torch.randn_like(mean) if noise is None else noise
        return self.decoder(mean + noise * torch.exp(0.5 * log_variance)), mean, log_variance


def vae(batch: int, image: int, channels: int, code: int) -> Case:
    images = torch.rand(batch, 1, image, image)

    def loss(outputs: Sequence[Tensor]) -> Tensor:
        logits, mean, log_variance = outputs
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        reconstruction = F.binary_cross_entropy_with_logits(logits, images, reduction="sum")
        return (reconstruction + divergence) / images.numel()

    # The noise is an argument so that the engines that are compared draw the same.
    return Case(VariationalAutoencoder(image, channels, code), (images, torch.randn(batch, code)), loss)


ENTRIES = (
    Entry(
        "vae",
        vae,
        {
            "test": {"batch": 3, "image": 8, "channels": 2, "code": 3},
            "bench": {"batch": 64, "image": 32, "channels": 32, "code": 32},
        },
    ),
)
