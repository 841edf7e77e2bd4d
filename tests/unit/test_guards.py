# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a guard of a step lets through."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from retrograd.frontend.autograd.steps.guards import StepGuard


@dataclass(frozen=True)
class Options:
    target: str


def step() -> dict[str, Any]:
    inputs = [torch.randn(8, requires_grad=True), torch.randn(4, 2), torch.randn(3).double()]
    return {"options": Options("cpu"), "inlined": ("hook", 3), "inputs": inputs, "sizes": [4], "scalars": [0.5]}


@pytest.fixture(autouse=True)
def as_in_a_backward() -> Iterator[None]:
    with torch.no_grad():
        yield


def replaced(number: int, tensor: torch.Tensor) -> dict[str, Any]:
    inputs = step()["inputs"]
    inputs[number] = tensor
    return {"inputs": inputs}


@pytest.mark.parametrize(
    "change",
    [
        {"options": Options("cuda")},
        {"inlined": ("hook", 4)},
        {"sizes": [5]},
        {"scalars": [0.25]},
        {"inputs": step()["inputs"][:2]},
        replaced(0, torch.randn(8)),
        replaced(1, torch.randn(2, 4)),
        replaced(1, torch.randn(8)),
        replaced(1, torch.randn(4, 1)),
        replaced(1, torch.randn(4, 2).bfloat16()),
        replaced(1, torch.randn(4, 2, device="meta")),
        replaced(1, torch._neg_view(torch.randn(4, 2))),
    ],
    ids=lambda change: "-".join(change),
)
def test_what_is_other_is_not_let_through(change: dict[str, Any]) -> None:
    assert not StepGuard(**step()).holds(**step() | change)


def test_steps_alike_are_let_through() -> None:
    guard = StepGuard(**step())
    assert guard.holds(**step())
    assert guard.holds(**step() | replaced(1, torch.randn(2, 4).t()))
    assert guard.holds(**step() | {"sizes": (4,), "scalars": (0.5,)})
    assert not torch.is_grad_enabled()


def test_no_numbers_are_alike_however_they_are_given() -> None:
    """A graph that computes with no numbers is given none, as a tuple."""
    guard = StepGuard(**step() | {"scalars": ()})
    assert guard.holds(**step() | {"scalars": ()})
    assert guard.holds(**step() | {"scalars": []})
    assert not guard.holds(**step())


def test_a_tensor_that_is_given_twice() -> None:
    def shared(*numbers: int) -> dict[str, Any]:
        tensors = [torch.randn(8) for _ in range(4)]
        return step() | {"inputs": [tensors[number] for number in numbers]}

    guard = StepGuard(**shared(0, 1, 0, 2, 1))
    assert guard.holds(**shared(3, 1, 3, 2, 1))
    for other in ((0, 1, 2, 3, 1), (0, 1, 1, 2, 1), (0, 1, 0, 2, 0), (0, 1, 0, 0, 1), (0, 1, 2, 3, 3)):
        assert not guard.holds(**shared(*other)), other


def test_gradients_of_gradients_are_not_let_through() -> None:
    guard = StepGuard(**step())
    with torch.enable_grad():
        assert not guard.holds(**step())


def test_a_guard_keeps_no_tensor() -> None:
    first = step()
    guard = StepGuard(**first)
    kept = [weakref.ref(tensor) for tensor in first.pop("inputs")]
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
    assert guard.holds(**step())
