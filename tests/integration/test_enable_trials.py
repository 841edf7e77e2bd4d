# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Backwards that take longer compiled are left to PyTorch's engine, as measured while a model trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import retrograd
from retrograd.frontend.autograd.engine.engine import Engine
from retrograd.frontend.autograd.engine.trials import Trial

STEPS = 90


class Program:
    """A model with a hook and a custom function, of which it counts the calls."""

    def __init__(self, seed: int, kind: str) -> None:
        torch.manual_seed(seed)
        self.layer, self.kind, self.calls = torch.nn.Linear(4, 4), kind, list[str]()
        self.layer.weight.register_post_accumulate_grad_hook(lambda _: self.calls.append("weight"))

    def loss(self, number: int) -> torch.Tensor:
        x = torch.full((2, 4), 0.1 * (number % 7))
        made: torch.Tensor = self.layer(x).tanh()
        made.register_hook(lambda _: self.calls.append("hook"))
        return made.exp().sum() if self.kind == "sum" else made.exp().mean()

    def run(self, number: int) -> list[Any]:
        self.layer.zero_grad()
        self.loss(number).backward()
        return [parameter.grad for parameter in self.layer.parameters()]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the backwards that are captured."""
    found, run = [0], Engine._run_switched

    def counting(engine: Engine, *arguments: Any) -> Any:
        found[0] += 1
        return run(engine, *arguments)

    monkeypatch.setattr(Engine, "_run_switched", counting)
    return found


def slowed(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    add = Trial.add_compiled
    monkeypatch.setattr(Trial, "add_compiled", lambda trial, seconds: add(trial, factor * seconds))


def train(program: Program, **options: Any) -> None:
    """Some steps, compared with eager's."""
    options = {"only_if_faster": True, **options}
    alike = Program(0, program.kind)
    alike.layer.load_state_dict(program.layer.state_dict())
    for number in range(STEPS):
        expected = alike.run(number)
        with retrograd.enable(**options):
            torch.testing.assert_close(program.run(number), expected)
    assert program.calls == alike.calls == ["hook", "weight"] * STEPS


def test_what_takes_longer_compiled_is_left_to_eager_and_told(
    monkeypatch: pytest.MonkeyPatch, captured: list[int]
) -> None:
    slowed(monkeypatch, 50.0)
    program, before = Program(0, "sum"), len(retrograd.explain_recompiles())
    train(program)
    entries = retrograd.explain_recompiles()[before:]
    assert [entry.outcome for entry in entries] == ["compiled", "is left to PyTorch's engine"]
    assert "only_if_faster=False" in entries[1].reasons[0]
    # From now on it is not even captured; another model of the same kind is.
    captured[0] = 0
    with retrograd.enable(only_if_faster=True):
        program.run(0)
    assert captured == [0]
    with retrograd.enable(only_if_faster=True):
        Program(1, "sum").run(0)
    assert captured != [0]
    # With the option, what was compiled is there still.
    train(Program(0, "sum"), only_if_faster=False)
    assert len(retrograd.explain_recompiles()) == before + 2
    captured[0] = 0
    with retrograd.enable(only_if_faster=False):
        program.run(0)
    assert captured != [0]
    # What has no backward ends as in eager.
    with retrograd.enable(only_if_faster=True):
        torch.autograd.backward([])
        with pytest.raises(RuntimeError, match="element 0 of tensors does not require grad"):
            torch.ones(3).sum().backward()


def test_what_is_faster_compiled_stays(monkeypatch: pytest.MonkeyPatch, captured: list[int]) -> None:
    slowed(monkeypatch, 0.02)
    before = len(retrograd.explain_recompiles())
    train(Program(0, "mean"))
    assert [entry.outcome for entry in retrograd.explain_recompiles()[before:]] == ["compiled"]
    assert captured[0] >= STEPS


@pytest.mark.parametrize("options", [{}, {"only_if_faster": True, "hook_schedule": "asap"}])
def test_what_is_not_to_be_timed_runs_compiled(
    monkeypatch: pytest.MonkeyPatch, options: Any, captured: list[int]
) -> None:
    slowed(monkeypatch, 50.0)
    before = len(retrograd.explain_recompiles())
    program = Program(2, "mean")
    with retrograd.enable(**options):
        for number in range(STEPS):
            program.run(number)
    assert "is left to PyTorch's engine" not in [e.outcome for e in retrograd.explain_recompiles()[before:]]
    assert captured[0] >= STEPS


def test_the_option_is_checked() -> None:
    with pytest.raises(TypeError, match="only_if_faster"):
        retrograd.enable(only_if_faster="yes")  # type: ignore[arg-type]
