# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Gradients that are small beside the residuals lie in these while the backward runs, and are copied when it has
returned: the same bits, in less memory, and nothing of it is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_autograd import run_in_threads
from test_donated_residuals import GIVEN, giving_nothing_up
from test_shorter_lifetimes import LOSSES, Deep, gradients
from torch import Tensor

import retrograd
from retrograd.runtime.programs import placed
from retrograd.runtime.steps import bound_function
from retrograd.runtime.steps.compiled import CompiledBackward

LOSS = LOSSES["the loss alone"]


@pytest.fixture(scope="module")
def model() -> Deep:
    torch.manual_seed(0)
    return Deep(128, 3)


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(2048, 128, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def step(model: Deep, x: Tensor) -> CompiledBackward:
    return retrograd.compile_backward(model, (x,), **GIVEN)


@pytest.fixture(scope="module")
def whole(model: Deep, x: Tensor) -> CompiledBackward:
    """A step that gives nothing up."""
    with giving_nothing_up():
        return retrograd.compile_backward(model, (x,), **GIVEN, cache=False)


def test_the_same_bits_in_less_memory(model: Deep, x: Tensor, step: CompiledBackward, whole: CompiledBackward) -> None:
    places = step._parts.program.donated("backward_into")[1]
    copied = [place for place in places if place.is_copied]
    assert len(copied) >= 2
    assert {place.size for place in copied} == {128 * 128 * 4}
    expected = gradients(model, LOSS(whole(x)))
    loss = LOSS(step(x))
    for _ in range(2):
        assert all(map(torch.equal, gradients(model, loss, retain_graph=True), expected))
    assert all(map(torch.equal, gradients(model, LOSS(step(x))), expected))
    reports = [one.explain().to_dict() for one in (step, whole)]
    assert all(r["peak_bytes_measured"] == r["peak_bytes_predicted"] for r in reports)
    saved = reports[1]["peak_bytes_measured"] - reports[0]["peak_bytes_measured"]
    assert saved >= len(copied) * 128 * 128 * 4


def test_nothing_is_kept_but_gradients(model: Deep, x: Tensor, step: CompiledBackward) -> None:
    gradients(model, LOSS(step(x)))
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(g.untyped_storage().nbytes() == g.nbytes and g.untyped_storage().resizable() for g in found)
    assert "shared_gradient_bytes" not in step.explain().to_dict()


def test_memory_of_the_residuals_may_be_anything_afterwards(
    model: Deep, x: Tensor, step: CompiledBackward, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, copy_out = gradients(model, LOSS(step(x))), placed.copy_out
    poisoned: list[int] = []

    def poison(places: Any, own: Any, allocators: Any, results: list[Tensor]) -> None:
        lying = {place.result: results[place.result] for place in places if place.is_copied}
        copy_out(places, own, allocators, results)
        for number, there in lying.items():
            there.view(torch.uint8).fill_(255)
            poisoned.append(number)

    monkeypatch.setattr(bound_function, "copy_out", poison)
    assert all(map(torch.equal, gradients(model, LOSS(step(x))), expected))
    assert poisoned


def test_threads(model: Deep, x: Tensor, step: CompiledBackward) -> None:
    expected = torch.autograd.grad(LOSS(step(x)), [*model.parameters()])
    found: list[tuple[Tensor, ...]] = []

    def run() -> None:
        found.extend(torch.autograd.grad(LOSS(step(x)), [*model.parameters()]) for _ in range(3))

    run_in_threads([run] * 2)
    assert len(found) == 6
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, expected, strict=True))
