# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A compiled step of ``retrograd.enable()`` that fails midway: what is left of it, and what becomes of later steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

import retrograd
from retrograd.runtime.programs.errors import ExecutionError
from retrograd.runtime.steps.bound_function import BoundFunction


class Logs(torch.autograd.Function):
    """A sine that logs its backward."""

    log: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a)
        return a.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Logs.log.append("function")
        (a,) = ctx.saved_tensors
        return gradients[0] * a.cos()


logs: Callable[[torch.Tensor], torch.Tensor] = Logs.apply


class Training:
    """Four weights, two functions in Python and a hook; compiled, four stages, with calls of Python between them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weights = [torch.randn(6, 6, requires_grad=True) for _ in range(4)]
        self.saved: list[weakref.ref[torch.Tensor]] = []
        self.hook_raises = False

    def hook(self, gradient: torch.Tensor) -> None:
        Logs.log.append("hook")
        if self.hook_raises:
            raise ValueError("the user's")

    def step(self) -> None:
        Logs.log.clear()
        for weight in self.weights:
            weight.grad = None
        first, second, third, fourth = self.weights
        y = (logs(torch.ones(3, 6) @ first) @ second).tanh()
        y.register_hook(self.hook)
        self.saved = [weakref.ref(y)]
        (logs(y @ third) @ fourth).square().sum().backward()

    def gradients(self) -> list[torch.Tensor | None]:
        return [None if weight.grad is None else weight.grad.clone() for weight in self.weights]


class Faults:
    """Has the call of a compiled function that is counted down to fail."""

    def __init__(self) -> None:
        self.left = 0
        self.error: type[Exception] = ExecutionError
        self._call = BoundFunction._invoke

    def invoke(self, function: Any, arguments: Any, results: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error("for this test")
        return self._call(function, arguments, results)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    found = Faults()
    monkeypatch.setattr(BoundFunction, "_invoke", lambda *given: found.invoke(*given))
    yield found


def train() -> tuple[Training, list[Any], list[str]]:
    """A training that runs compiled, the gradients of a step, and what it logs."""
    eager = Training()
    eager.step()
    expected, logged = eager.gradients(), [*Logs.log]
    training = Training()
    with retrograd.enable():
        for _ in range(3):
            training.step()
    return training, expected, logged


def assert_right(training: Training, expected: list[Any], logged: list[str]) -> None:
    torch.testing.assert_close(training.gradients(), expected, rtol=2e-5, atol=1e-6)
    assert Logs.log == logged


@pytest.mark.parametrize("error", [ExecutionError, torch.OutOfMemoryError])
def test_a_failure_before_anything_shows_is_made_good(faults: Faults, error: type[Exception]) -> None:
    training, expected, logged = train()
    before = len(retrograd.explain_recompiles())
    with retrograd.enable():
        faults.left, faults.error = 1, error
        training.step()
        assert faults.left <= 0
        assert_right(training, expected, logged)
        for _ in range(2):
            training.step()
            assert_right(training, expected, logged)
    entries = retrograd.explain_recompiles()[before:]
    assert any("for this test" in reason for entry in entries for reason in entry.reasons)


@pytest.mark.parametrize("stage", [2, 4])
def test_a_failure_midway_says_what_to_do(faults: Faults, stage: int) -> None:
    """Nothing is called twice, no tensor is left, and the step can be repeated."""
    training, expected, logged = train()
    with retrograd.enable():
        faults.left = stage
        with pytest.raises(ExecutionError, match="for this test") as raised:
            training.step()
        assert any("zero_grad" in note for note in raised.value.__notes__)
        assert Logs.log == logged[: len(Logs.log)] and len(Logs.log) >= 1
        found = training.gradients()
        assert found[0] is None and found[3] is not None
        torch.testing.assert_close(found[3], expected[3], rtol=2e-5, atol=1e-6)
        del raised
        assert [tensor() for tensor in training.saved] == [None]
        for _ in range(3):
            training.step()
            assert_right(training, expected, logged)


def test_a_hook_that_raises_leaves_what_eager_leaves() -> None:
    training, expected, logged = train()
    eager = Training()
    eager.hook_raises = training.hook_raises = True
    with pytest.raises(ValueError, match="the user's"):
        eager.step()
    left, called = eager.gradients(), [*Logs.log]
    with retrograd.enable():
        with pytest.raises(ValueError, match="the user's"):
            training.step()
        torch.testing.assert_close(training.gradients(), left, rtol=2e-5, atol=1e-6)
        assert Logs.log == called
        training.hook_raises = False
        training.step()
        assert_right(training, expected, logged)
