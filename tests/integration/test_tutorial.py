# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The examples of PyTorch's compiled-autograd tutorial, with ``retrograd.enable()`` in its place.

https://docs.pytorch.org/tutorials/intermediate/compiled_autograd_tutorial.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import retrograd


class Model(nn.Module):
    """The tutorial's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x)


def outcomes(since: int) -> list[str]:
    return [entry.outcome for entry in retrograd.explain_recompiles()[since:]]


def now() -> int:
    return len(retrograd.explain_recompiles())


def gradients(model: Any) -> list[torch.Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def test_basic_usage() -> None:
    model, x = Model(), torch.randn(10)
    model(x).sum().backward()
    expected = gradients(model)

    @torch.compile(backend="aot_eager")
    def train(model: Any, x: torch.Tensor) -> None:
        model(x).sum().backward()

    before = now()
    for _ in range(2):
        with retrograd.enable():
            train(model, x)
        torch.testing.assert_close(gradients(model), expected)
    assert outcomes(before) == ["compiled"]


def test_one_backward_graph_across_three_forward_graphs() -> None:
    """The tutorial's count: AOTAutograd has 3 backward graphs where there are 2 graph breaks, compiled autograd one."""

    def forward(x: torch.Tensor) -> Any:
        x = x.sin() * 1
        torch._dynamo.graph_break()
        x = x.cos() * 2
        torch._dynamo.graph_break()
        return (x.tanh() * 3).sum()

    x = torch.randn(10, requires_grad=True)
    (expected,) = torch.autograd.grad(forward(x), x)
    compiled = torch.compile(forward, backend="aot_eager")
    before = now()
    for _ in range(2):
        x.grad = None
        with retrograd.enable():
            compiled(x).backward()
        torch.testing.assert_close(x.grad, expected)
    assert outcomes(before) == ["compiled"]
    (entry,) = retrograd.explain_recompiles()[before:]
    assert sum("CompiledFunction" in node for node in entry.nodes) == 3


def test_hooks_are_captured() -> None:
    log: list[int] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        log.append(gradient.numel())
        return gradient + 2

    model, x = Model(), torch.randn(10)
    model.linear.weight.register_hook(hook)
    before = now()
    for _ in range(2):
        with retrograd.enable():
            model(x).sum().backward()
        torch.testing.assert_close(gradients(model)[0], x.expand(10, 10) + 2)
    assert outcomes(before) == ["compiled"]
    assert log == [100, 100]


def test_a_structure_that_changes() -> None:
    """The tutorial's: another operator recompiles, each once; here the first is there still when it comes again."""
    model = Model()
    x = torch.randn(10)

    def train(operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        operation(model(x)).sum().backward()

    before = now()
    for operation in (torch.add, torch.sub, torch.mul, torch.add, torch.mul):

        def call(y: torch.Tensor, operation: Any = operation) -> torch.Tensor:
            result: torch.Tensor = operation(y, y.detach().square())
            return result

        train(call)
        expected = gradients(model)
        with retrograd.enable():
            train(call)
        torch.testing.assert_close(gradients(model), expected)
    assert outcomes(before).count("compiled") <= 3
    assert "runs eagerly" not in outcomes(before)


def test_shapes_that_change() -> None:
    """The tutorial's count is 2 for 10, 100, 10; here no size that follows adds to it."""

    def run(size: int) -> torch.Tensor:
        x = torch.linspace(0, 1, size).requires_grad_()
        (x.sin() * x).sum().backward()
        assert x.grad is not None
        return x.grad

    before = now()
    for size in (10, 100, 10, 1, 37):
        expected = run(size)
        with retrograd.enable():
            found = run(size)
        torch.testing.assert_close(found, expected)
    assert outcomes(before) == ["compiled", "compiled"]
