# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Common subexpressions: merged in MLIR and on the captured graph alike, with eager's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd


class Repetitive(nn.Module):
    """Computes much twice: within the forward, and in the forward and the backward (``silu``)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.first(x)
        a, b = torch.sigmoid(y), torch.sigmoid(y)
        largest, _ = torch.max(y, 1, keepdim=True)
        again, places = torch.max(y, 1, keepdim=True)
        out = self.last(a * F.silu(y) * b * largest * again + places)
        return out, torch.sigmoid(y), torch.sigmoid(y)


def gradients(call: Callable[..., Any], model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    loss = sum((i + 1) * t.square().sum() for i, t in enumerate(call(x)))
    assert isinstance(loss, Tensor)
    return torch.autograd.grad(loss, [x, *model.parameters()])


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Repetitive()


def assert_eager(found: tuple[Tensor, ...], model: nn.Module, x: Tensor) -> None:
    for a, b in zip(found, gradients(model, model, x), strict=True):
        assert float((a - b).norm() / b.norm()) <= 2e-5


@pytest.mark.short_cases("min-cut")
@pytest.mark.parametrize("partition", ["default", "min-cut"])
def test_gradients_and_what_was_merged(model: nn.Module, partition: Any) -> None:
    x = torch.randn(5, 6, requires_grad=True)
    step = retrograd.compile_backward(model, (x,), partition=partition, verify=True)
    assert_eager(gradients(step, model, x), model, x)
    _, first, second = step(x)
    assert first.data_ptr() != second.data_ptr(), "each output is a tensor of its own"
    partitioned = step.mlir("partitioned")
    assert 'sigmoid_1 = "sigmoid"' in partitioned
    assert 'getitem_2 = "getitem"' in partitioned
    # silu's backward has a sigmoid of its own, which costs nothing to save.
    assert 'sigmoid_5 = "sigmoid"' not in partitioned


@pytest.mark.long
def test_torch_compile(model: nn.Module) -> None:
    torch._dynamo.reset()
    x = torch.randn(5, 6, requires_grad=True)
    assert_eager(gradients(torch.compile(model, backend="retrograd", dynamic=False), model, x), model, x)
