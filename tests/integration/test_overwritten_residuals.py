# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Backwards that write scratch buffers over residuals which they have read: gradients as before, and nothing that
somebody else has is written to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd
from retrograd.runtime.bound_function import BoundFunction
from retrograd.runtime.compiled import CompiledBackward


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(torch.layer_norm(layer(x), (64,)))
        return x.pow(2).mean()


@pytest.fixture(scope="module")
def model() -> Deep:
    torch.manual_seed(0)
    return Deep()


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(256, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def step(model: Deep, x: Tensor) -> CompiledBackward:
    step = retrograd.compile_backward(model, (x,), partition="default", kernels="off")
    # The first call is checked on copies, and the next one has copies of what is overwritten.
    for _ in range(2):
        gradients(model, step(x))
    return step


@pytest.fixture(scope="module")
def expected(model: Deep, x: Tensor) -> list[Tensor]:
    return gradients(model, model(x))


def gradients(model: Deep, loss: Tensor, **options: Any) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), **options)
    return [gradient.clone() for gradient in found]


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


class Calls:
    """Counts calls of functions that overwrite arguments, and how many of these were copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = self.copied = 0
        give_up = BoundFunction._give_up

        def counted(function: BoundFunction, arguments: Sequence[Any]) -> Sequence[Any]:
            # Nothing here may hold an argument: it is asked who does.
            given = give_up(function, arguments)
            self.made += 1
            self.copied += sum(given[n] is not arguments[n] for n in function._overwritten)
            return given

        monkeypatch.setattr(BoundFunction, "_give_up", counted)


def test_residuals_are_overwritten_and_gradients_stay(
    model: Deep, step: CompiledBackward, x: Tensor, expected: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    runs = [gradients(model, step(x)) for _ in range(3)]
    assert (calls.made, calls.copied) == (3, 0)
    assert_close(runs[0], expected)
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))
    report = step.explain().to_dict()
    assert report["peak_bytes_measured"] == report["peak_bytes_predicted"]


def test_it_takes_less_than_without(model: Deep, step: CompiledBackward, x: Tensor) -> None:
    """By a residual: a file has whole functions, whose arguments are their callers'."""
    kept = retrograd.compile_backward(model, (x,), partition="default", kernels="off", portable=True)
    mine, theirs = (s.explain().to_dict()["peak_bytes_predicted"] for s in (step, kept))
    assert theirs - mine >= 256 * 64 * 4


def test_with_retain_graph_a_second_backward_is_the_same(
    model: Deep, step: CompiledBackward, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    loss = step(x)
    first = gradients(model, loss, retain_graph=True)
    assert calls.copied > 0
    before = calls.copied
    second = gradients(model, loss)
    assert calls.copied == before
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_a_hook_keeps_is_left_alone(
    model: Deep, step: CompiledBackward, x: Tensor, expected: list[Tensor]
) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step(x)
    before = [tensor.clone() for tensor in kept]
    assert_close(gradients(model, loss), expected)
    assert len(kept) > 4
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


def test_views_that_a_hook_keeps_are_left_alone(model: Deep, step: CompiledBackward, x: Tensor) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach().reshape(-1))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step(x)
    before = [tensor.clone() for tensor in kept]
    gradients(model, loss)
    assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


def test_poisoned_memory_makes_no_difference(
    model: Deep, step: CompiledBackward, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage for results is NaN before a call, and residuals are behind it."""
    clean = gradients(model, step(x))
    call = BoundFunction.__call__

    def poisoned(function: BoundFunction, arguments: Sequence[Any]) -> list[Tensor]:
        allocators = function._allocators or ()
        function._allocators = [lambda make=make: _fill(make()) for make in allocators] or None  # type: ignore[misc]
        try:
            results = call(function, arguments)
        finally:
            function._allocators = allocators or None
        for number in function._overwritten:
            arguments[number].fill_(float("nan"))
        return results

    monkeypatch.setattr(BoundFunction, "__call__", poisoned)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, step(x)), clean, strict=True))


def _fill(tensor: Tensor) -> Tensor:
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor


def test_threads_have_residuals_of_their_own(
    model: Deep, step: CompiledBackward, x: Tensor, expected: list[Tensor]
) -> None:
    found: list[list[Tensor]] = []

    def work() -> None:
        for _ in range(5):
            found.append(gradients(model, step(x)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    for run in found:
        assert_close(run, expected)
