# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Recurrent networks: a classifier of sequences and a language model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.case import Case, Entry, identity
from models.gpt import next_tokens


class LSTMClassifier(nn.Module):
    """Classifies a sequence by the last state of an LSTM: [batch, steps, features] to [batch, classes]."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(x)
        return self.head(hidden[-1])  # type: ignore[no-any-return]


class LSTMLanguageModel(nn.Module):
    """Stacked LSTM over text: (tokens, targets), int64 [batch, tokens], to the mean cross entropy."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(states).flatten(0, 1), targets.flatten())


def lstm(batch: int, steps: int, features: int, hidden: int, classes: int) -> Case:
    labels = torch.randint(classes, (batch,))
    model = LSTMClassifier(features, hidden, classes)
    return Case(model, (torch.randn(batch, steps, features),), lambda y: F.cross_entropy(y, labels))


def lstm_language_model(batch: int, tokens: int, width: int, layers: int, vocabulary: int) -> Case:
    return Case(LSTMLanguageModel(vocabulary, width, layers), next_tokens(batch, tokens, vocabulary), identity)


ENTRIES = (
    Entry(
        "lstm",
        lstm,
        {
            "test": {"batch": 3, "steps": 4, "features": 6, "hidden": 8, "classes": 3},
            "bench": {"batch": 64, "steps": 24, "features": 64, "hidden": 256, "classes": 10},
        },
    ),
    Entry(
        "lstm_language_model",
        lstm_language_model,
        {
            "test": {"batch": 2, "tokens": 3, "width": 6, "layers": 2, "vocabulary": 9},
            "bench": {"batch": 16, "tokens": 32, "width": 256, "layers": 2, "vocabulary": 8192},
        },
    ),
)
