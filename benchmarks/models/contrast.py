# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A function of a dictionary of tensors, with several outputs, some of which need no gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.case import Case, Entry


def contrast(pair: Mapping[str, Tensor], weights: list[Tensor], temperature: float) -> dict[str, Any]:
    """Similarity of two batches of rows, [batch, features] each, under two projections, with what is logged of it.

    Gives ``{"loss": scalar, "projected": (left, right), "log": {"best": int64 [batch], "mean": scalar}}``; what is
    under ``"log"`` needs no gradient.
    """
    left = F.normalize(torch.tanh(pair["left"] @ weights[0]), dim=-1)
    right = F.normalize(torch.tanh(pair["right"] @ weights[1]), dim=-1)
    logits = left @ right.T / temperature
    loss = (torch.logsumexp(logits, dim=-1) - logits.diagonal()).mean()
    log = {"best": logits.argmax(dim=-1), "mean": logits.detach().mean()}
    return {"loss": loss, "projected": (left, right), "log": log}


def several_outputs(batch: int, features: int, projected: int) -> Case:
    pair = {"left": torch.randn(batch, features), "right": torch.randn(batch, features, requires_grad=True)}
    weights = [(torch.randn(features, projected) / features**0.5).requires_grad_() for _ in range(2)]

    def loss(outputs: Mapping[str, Any]) -> Tensor:
        left, right = outputs["projected"]
        return outputs["loss"] + 0.1 * (left.pow(2).mean() + right.abs().mean())  # type: ignore[no-any-return]

    return Case(contrast, (pair, weights, 0.5), loss)


ENTRIES = (
    Entry(
        "several_outputs",
        several_outputs,
        {
            "test": {"batch": 6, "features": 10, "projected": 4},
            "bench": {"batch": 1024, "features": 512, "projected": 128},
        },
    ),
)
