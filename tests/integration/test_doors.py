# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The three ways in: each prepares a graph by the one list of steps, and builds what it captured once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import retrograd
from retrograd import stagers
from retrograd.built import Build
from retrograd.contract.roles import BACKWARD, JOINT
from retrograd.frontend.doors.captured_graph import Captured
from retrograd.frontend.preparation import prepare


class Cube(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x) ** 3


class Spectrum(nn.Module):
    """Eigenvalues run in torch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.linalg.eigvals(x).real
        return result


def through_compile_backward(model: nn.Module, x: torch.Tensor) -> None:
    retrograd.compile_backward(model, (x,))(x).sum().backward()


def through_torch_compile(model: nn.Module, x: torch.Tensor) -> None:
    torch._dynamo.reset()
    torch.compile(model, backend="retrograd")(x).sum().backward()


def through_enable(model: nn.Module, x: torch.Tensor) -> None:
    for _ in range(2):
        model.zero_grad()
        with retrograd.enable():
            model(x).sum().backward()


@pytest.mark.parametrize(
    ("door", "function"),
    [(through_compile_backward, JOINT), (through_torch_compile, JOINT), (through_enable, BACKWARD)],
)
def test_each_door_prepares_one_graph_and_builds_it_once(
    door: Callable[[nn.Module, torch.Tensor], None], function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, imported, loaded = list[str](), list[Captured](), list[stagers.Work]()

    def watch(step: prepare.Step) -> prepare.Step:
        def run(traced: prepare.Traced) -> None:
            steps.append(step.why)
            step.run(traced)

        return replace(step, run=run)

    def watched_import(captured: Captured, *args: Any) -> Any:
        imported.append(captured)
        return stagers_import(captured, *args)

    def watched_build(*, work: stagers.Work, **parts: Any) -> Any:
        loaded.append(work)
        return Build(work=work, **parts)

    stagers_import = stagers.import_captured
    monkeypatch.setattr(prepare, "PREPARE", tuple(map(watch, prepare.PREPARE)))
    monkeypatch.setattr(stagers, "import_captured", watched_import)
    monkeypatch.setattr("retrograd.build.Build", watched_build)
    torch.manual_seed(0)
    model, x = Cube(), torch.randn(3)
    expected = torch.autograd.grad(model(x).sum(), model.weight)[0]
    door(model, x)
    torch.testing.assert_close(model.weight.grad, expected)
    assert steps == [step.why for step in prepare.PREPARE]
    assert [captured.function for captured in imported] == [function]
    assert [work.captured for work in loaded] == imported


def test_a_warning_of_the_build_names_the_users_line() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Spectrum())
    with pytest.warns(retrograd.EagerIslandWarning) as caught:
        retrograd.compile_backward(model, (torch.randn(4, 4),))
    assert caught[0].filename == __file__
