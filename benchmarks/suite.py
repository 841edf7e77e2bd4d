# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The models that are benchmarked, and whose gradients the tests compare: one of each common kind, in two sizes.

``small`` compiles in seconds and is for tests; the backward pass of ``bench`` takes 5 to 100 ms in eager PyTorch on
two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Size = Literal["small", "bench"]
SIZES: tuple[Size, ...] = ("small", "bench")


@dataclass(frozen=True)
class Case:
    """Something to differentiate: ``loss(model(*args))`` is a scalar, float32, that requires grad."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    loss: Callable[[Any], Tensor]

    def leaves(self) -> dict[str, Tensor]:
        """What gets a gradient: parameters by qualified name, arguments as ``args[...]``."""
        parameters = dict(self.model.named_parameters()) if isinstance(self.model, nn.Module) else {}
        keyed, _ = pytree.tree_flatten_with_path(self.args)
        arguments = {f"args{pytree.keystr(path)}": leaf for path, leaf in keyed if isinstance(leaf, Tensor)}
        return parameters | {name: tensor for name, tensor in arguments.items() if tensor.requires_grad}


@dataclass(frozen=True)
class Entry:
    """A model of the suite: ``build`` makes it from the ``sizes`` of one of the names in ``SIZES``."""

    name: str
    build: Callable[..., Case]
    sizes: Mapping[Size, Mapping[str, int]]

    def make(self, size: Size) -> Case:
        """The same case each time: same parameters, same arguments. The caller's random state stays as it is."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build(**self.sizes[size])


def _linear_regression(batch: int, features: int) -> Case:
    target = torch.randn(batch, 1)
    return Case(nn.Linear(features, 1), (torch.randn(batch, features),), lambda y: F.mse_loss(y, target))


def _mlp(batch: int, features: int, hidden: int, classes: int) -> Case:
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


def _cnn(batch: int, channels: int, image: int, classes: int) -> Case:
    def stage(inputs: int, outputs: int, *, stride: int = 1) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]

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


class LSTMClassifier(nn.Module):
    """Classifies a sequence by the last state of an LSTM: [batch, steps, features] to [batch, classes]."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(x)
        return self.head(hidden[-1])  # type: ignore[no-any-return]


def _lstm(batch: int, steps: int, features: int, hidden: int, classes: int) -> Case:
    labels = torch.randint(classes, (batch,))
    model = LSTMClassifier(features, hidden, classes)
    return Case(model, (torch.randn(batch, steps, features),), lambda y: F.cross_entropy(y, labels))


class TransformerBlock(nn.Module):
    """Attention, then a feed-forward network, each on a layer norm and with a residual: [batch, tokens, width]."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=self.causal)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))  # type: ignore[no-any-return]


def _transformer(batch: int, tokens: int, width: int, heads: int) -> Case:
    # The input needs a gradient too, as it does in the middle of a network.
    x = torch.randn(batch, tokens, width, requires_grad=True)
    target = torch.randn(batch, tokens, width)
    return Case(TransformerBlock(width, heads), (x,), lambda y: F.mse_loss(y, target))


class LanguageModel(nn.Module):
    """A small GPT whose head is its embedding: (tokens, targets), int64 [batch, tokens], to the mean cross entropy."""

    def __init__(self, vocabulary: int, tokens: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.embedding(tokens) + self.position)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _language_model(batch: int, tokens: int, width: int, heads: int, layers: int, vocabulary: int) -> Case:
    text = torch.randint(vocabulary, (batch, tokens + 1))
    model = LanguageModel(vocabulary, tokens, width, heads, layers)
    return Case(model, (text[:, :-1].contiguous(), text[:, 1:].contiguous()), lambda loss: loss)


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


def _several_outputs(batch: int, features: int, projected: int) -> Case:
    pair = {"left": torch.randn(batch, features), "right": torch.randn(batch, features, requires_grad=True)}
    weights = [(torch.randn(features, projected) / features**0.5).requires_grad_() for _ in range(2)]

    def loss(outputs: Mapping[str, Any]) -> Tensor:
        left, right = outputs["projected"]
        return outputs["loss"] + 0.1 * (left.pow(2).mean() + right.abs().mean())  # type: ignore[no-any-return]

    return Case(contrast, (pair, weights, 0.5), loss)


SUITE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "linear_regression",
            _linear_regression,
            {"small": {"batch": 16, "features": 5}, "bench": {"batch": 16384, "features": 2048}},
        ),
        Entry(
            "mlp",
            _mlp,
            {
                "small": {"batch": 8, "features": 12, "hidden": 16, "classes": 4},
                "bench": {"batch": 256, "features": 784, "hidden": 1024, "classes": 10},
            },
        ),
        Entry(
            "cnn",
            _cnn,
            {
                "small": {"batch": 4, "channels": 4, "image": 8, "classes": 5},
                "bench": {"batch": 32, "channels": 32, "image": 32, "classes": 10},
            },
        ),
        Entry(
            "lstm",
            _lstm,
            {
                "small": {"batch": 3, "steps": 4, "features": 6, "hidden": 8, "classes": 3},
                "bench": {"batch": 64, "steps": 24, "features": 64, "hidden": 256, "classes": 10},
            },
        ),
        Entry(
            "transformer",
            _transformer,
            {
                "small": {"batch": 2, "tokens": 6, "width": 16, "heads": 2},
                "bench": {"batch": 8, "tokens": 128, "width": 256, "heads": 4},
            },
        ),
        Entry(
            "language_model",
            _language_model,
            {
                "small": {"batch": 2, "tokens": 6, "width": 16, "heads": 2, "layers": 1, "vocabulary": 11},
                "bench": {"batch": 4, "tokens": 128, "width": 128, "heads": 4, "layers": 4, "vocabulary": 4096},
            },
        ),
        Entry(
            "several_outputs",
            _several_outputs,
            {
                "small": {"batch": 6, "features": 10, "projected": 4},
                "bench": {"batch": 1024, "features": 512, "projected": 128},
            },
        ),
    )
}
