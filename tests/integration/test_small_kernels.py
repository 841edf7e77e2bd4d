# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels of our own are looked for in whole programs, with no size too small for one: what looks for them meets ops of
every form, which tests of large tensors would take minutes for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd
from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.devices.targets import find_target
from retrograd.pipelines.infra.runner import run_pipeline
from retrograd.pipelines.kernels import column_sums, products, row_ops, rows, transposes
from retrograd.pipelines.kernels.choice import NAMES, with_kernels
from retrograd.pipelines.stages import staged
from retrograd.pipelines.toolchain.lowering_steps import lowering_pipeline

SMALLEST = (
    (column_sums, "FEWEST", 1),
    (column_sums, "FEWEST_COLUMNS", 2),
    (column_sums, "FEWEST_ROWS", 2),
    (row_ops, "FEWEST", 1),
    (row_ops, "SHORTEST", 2),
    (products, "FEWEST", 1),
    (products, "SHORTEST", 1),
    (rows, "FEWEST", 1),
    (rows, "SHORTEST", 2),
    (transposes, "FEWEST", 1),
    (transposes, "SHORTEST", 2),
)


class Block(nn.Module):
    """Attention and a feed-forward layer between norms, to the mean of a loss that is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(11, 8), nn.Linear(8, 24)
        self.before, self.after, self.head = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, places: Tensor, scale: Tensor) -> Tensor:
        x = self.table(places)
        q, k, v = self.inner(self.before(x)).reshape(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 5, 8)
        scores = self.head(F.gelu(self.after(x)))
        loss = F.cross_entropy(scores.flatten(0, 1), places.flatten())
        return loss * scale + (scale.exp() - loss).square()


def complex_states(x: Tensor, turn: Tensor, norm: Tensor) -> Tensor:
    """States on a circle, each divided by the length of all, and a number from all of them."""
    h = torch.polar(x.square() + 0.1, turn)
    h = h / (h.abs().sum(-1, keepdim=True) * norm.exp())
    return (h * h.conj()).real.sum() / norm + (x.softmax(-1) - x.mean()).std()


def images(x: Tensor, filters: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = F.batch_norm(F.conv2d(x, filters, padding=1), None, None, weight, bias, training=True)
    return F.max_pool2d(y.relu(), 2).flatten(1).logsumexp(1).mean()


class Stopped(BaseException):
    """Nothing is to be compiled."""


def sources_of(function: Callable[..., Tensor], args: Sequence[Tensor], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules of a program that would be lowered for a CUDA device."""
    found: list[str] = []

    def take(module: staged.StagedModule, *_given: object, **_named: object) -> None:
        found.append(module.source)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(staged, "_compile", take)
        with pytest.raises(Stopped):
            retrograd.compile_backward(function, args, target="cuda:sm_90", kernels=NAMES, cache=False)
    return found


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


PROGRAMS: dict[str, Callable[[], tuple[Callable[..., Tensor], Sequence[Tensor]]]] = {
    "block": lambda: (Block(), (torch.randint(11, (2, 5)), leaf())),
    "complex": lambda: (complex_states, (leaf(3, 6), leaf(3, 6), leaf())),
    "images": lambda: (images, (leaf(2, 4, 6, 6), leaf(8, 4, 3, 3), leaf(8), leaf(8))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_whatever_looks_for_kernels_takes_or_leaves_each_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = sources_of(*PROGRAMS[name](), monkeypatch)
    for module, constant, value in SMALLEST:
        monkeypatch.setattr(module, constant, value)
    target = with_kernels(find_target("cuda", cuda_architecture="sm_90"), "auto")
    passes = lowering_pipeline(target, twins_alone=True, donating=True).replace("families=", "ptx=none families=")
    with make_context() as context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        lowered = ir.Module.parse(source)
        run_pipeline(lowered, passes)
        text = str(lowered.operation.attributes["bwd.kernels"])
    assert " along " in text
