# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A model that registers hooks on its own modules the first time it runs, called in eager after it was compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd


class Collecting(nn.Module):
    """Its loss is of what a hook collects of its layer, as libraries collect what their layers give."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.collected: list[Tensor] = []
        self.scale = 2.0
        self.installed = False

    def install(self, scale: float) -> None:
        collected = self.collected

        def add(value: Tensor) -> None:
            collected.append(value)

        def collect(module: nn.Module, args: Any, output: Tensor) -> None:
            add(output * scale)

        self.layer.register_forward_hook(collect)

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            self.install(self.scale)
            self.installed = True
        self.layer(x)
        return self.collected.pop().square().sum()


def gradient(call: Any, model: nn.Module, x: Tensor) -> Tensor:
    (found, *_) = torch.autograd.grad(call(x), tuple(model.parameters()))
    return found


def test_a_call_in_eager_may_register_the_hooks_that_were_traced() -> None:
    torch.manual_seed(0)
    model, x = Collecting(), torch.randn(3, 4)
    step = retrograd.compile_backward(model, (x,))
    assert not model.layer._forward_hooks
    first = gradient(step, model, x)
    expected = gradient(model, model, x)
    assert len(model.layer._forward_hooks) == 1
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(gradient(step, model, x), expected)
    # Taken away, it is as when the model was compiled; once more than that, it is another model.
    model.layer._forward_hooks.clear()
    with pytest.raises(retrograd.ArgumentError, match="hooks were added"):
        step(x)
    model.install(2.0)
    model.install(2.0)
    with pytest.raises(retrograd.ArgumentError, match="hooks were added"):
        step(x)


def test_other_hooks_are_still_refused() -> None:
    """The same code with another value; and other code."""
    model, x = Collecting(), torch.randn(3, 4)
    step = retrograd.compile_backward(model, (x,))
    model.install(3.0)
    with pytest.raises(retrograd.ArgumentError, match="hooks were added"):
        step(x)
    model.layer._forward_hooks.clear()
    step(x)
    model.layer.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(retrograd.ArgumentError, match="hooks were added"):
        step(x)
