# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Steps of which no more is asked than where their tensors begin, and steps whose tensors lie otherwise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import retrograd
from retrograd.frontend.autograd.steps.direct_step import DirectStep
from retrograd.runtime.programs import loaded
from retrograd.runtime.programs.copied_call import CopiedCall

# Compiled, rehearsed, and found to be short.
WARM_UP = 6


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step that was tried directly, whether it ran so; a function is short after three calls."""
    tried: list[bool] = []
    run = DirectStep.run

    def watched(step: DirectStep, inputs: list[torch.Tensor]) -> list[Any] | None:
        results = run(step, inputs)
        tried.append(results is not None)
        assert results is None or not inputs
        return results

    # Of another test.
    torch._C._dynamo.compiled_autograd.clear_cache()
    monkeypatch.setattr(loaded, "has_one_worker", lambda: True)
    monkeypatch.setattr(DirectStep, "run", watched)
    return tried


def own() -> torch.Tensor:
    return torch.randn(3, 4)


def transposed() -> torch.Tensor:
    return torch.randn(4, 3).t()


def expanded() -> torch.Tensor:
    return torch.randn(1, 4).expand(3, 4)


def first_half() -> torch.Tensor:
    return torch.randn(3, 8)[:, :4]


def second_half() -> torch.Tensor:
    return torch.randn(3, 8)[:, 4:]


def half_of_more() -> torch.Tensor:
    return torch.randn(5, 8)[:3, :4]


def step(parameters: list[torch.Tensor], x: torch.Tensor, enabled: bool) -> list[torch.Tensor]:
    w, v = parameters
    with retrograd.enable() if enabled else nullcontext():
        ((w * x).sin() @ v).sum().backward()
    return [p.grad.clone(memory_format=torch.preserve_format) for p in parameters if p.grad is not None]


def compare(kinds: list[Callable[[], torch.Tensor]], zeroed: bool = True, turned_at: int = -1) -> None:
    """Take steps beside eager; from one on the parameters lie otherwise."""
    mine: list[torch.Tensor] = [torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)]
    theirs = [p.detach().clone().requires_grad_() for p in mine]
    for number, kind in enumerate(kinds):
        x = kind()
        for parameter in [*mine, *theirs] if number == turned_at else ():
            parameter.data = parameter.data.t().contiguous().t()
        for parameter in [*mine, *theirs] if zeroed else ():
            parameter.grad = None
        found, expected = step(mine, x, True), step(theirs, x, False)
        assert len(found) == 2
        torch.testing.assert_close(found, expected, check_stride=True)
        with torch.no_grad():
            for parameter, other in zip(mine, theirs, strict=True):
                other.copy_(parameter.sub_(0.1))


@pytest.mark.parametrize("usual", [own, transposed, first_half])
def test_what_lies_otherwise_runs_otherwise(usual: Callable[[], torch.Tensor], direct: list[bool]) -> None:
    others = [own, transposed, expanded, first_half, second_half, half_of_more]
    compare([usual] * WARM_UP + [kind for other in others for kind in (other, usual)])
    assert direct.count(True) > len(others)
    # Only of parts is it asked how much memory they are of.
    assert direct.count(False) == (2 if usual is first_half else 0)


def test_parameters_that_lie_otherwise_get_gradients_that_do(direct: list[bool]) -> None:
    compare([own] * (WARM_UP + 4), turned_at=WARM_UP + 2)
    assert direct.count(True) >= 2


def test_gradients_are_added_to_those_that_are_there(direct: list[bool]) -> None:
    compare([own] * (WARM_UP + 4), zeroed=False)
    assert direct.count(True) >= 3


def test_what_a_direct_call_cannot_do_is_done_as_ever(direct: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[Any] = []

    def refuse(call: CopiedCall, addresses: Any, results: Any) -> bool:
        refused.append(call)
        return False

    monkeypatch.setattr(CopiedCall, "call_at", refuse)
    compare([own] * (WARM_UP + 2))
    assert refused and direct == [False] * len(refused)
