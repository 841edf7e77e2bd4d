# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Scratch buffers that lie in storage for results: whatever that held before, results are bit for bit the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd
from retrograd.contract.tensors import TensorSpec
from retrograd.runtime.programs.executor import Program
from retrograd.runtime.steps.compiled import CompiledBackward

POISONS = (float("nan"), float("inf"), 1e30)


@contextmanager
def poisoned(monkeypatch: pytest.MonkeyPatch, value: float) -> Iterator[list[int]]:
    """Storage for results holds ``value`` before a call; gives the sizes in bytes of what was filled."""
    filled: list[int] = []
    allocate, make_allocators = Program.allocate, Program.make_allocators

    def fill(tensor: Tensor) -> Tensor:
        filled.append(tensor.nbytes)
        return tensor.fill_(value) if tensor.is_floating_point() else tensor.fill_(77)

    def allocate_filled(program: Program, specs: Sequence[TensorSpec]) -> list[Tensor]:
        return [fill(tensor) for tensor in allocate(program, specs)]

    def make_filling(program: Program, specs: Sequence[TensorSpec]) -> list[Callable[[], Tensor]]:
        return [lambda make=make: fill(make()) for make in make_allocators(program, specs)]  # type: ignore[misc]

    with monkeypatch.context() as patched:
        patched.setattr(Program, "allocate", allocate_filled)
        patched.setattr(Program, "make_allocators", make_filling)
        yield filled


class Many(nn.Module):
    """A tied weight, an output that is returned twice, one that is a view of another, one of whole numbers, and one
    without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

    def forward(self, ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        h = self.embed(ids) + x
        for layer in self.layers:
            h = torch.tanh(torch.layer_norm(layer(h), (32,)))
        logits = h @ self.embed.weight.t()
        loss = nn.functional.cross_entropy(logits, ids)
        return loss, logits, logits, logits[:2], logits.argmax(1), h[:0]


class Half(nn.Module):
    """A small result is written behind a large one, and scratch buffers are as large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.softmax(self.first(x), 1)
        narrow = torch.layer_norm(self.second(wide), (16,))
        return narrow.pow(3).mean(), wide.cos()


def run_many(model: Many, call: Callable[..., Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, x = torch.randint(48, (64,), generator=generator), torch.randn(64, 32, generator=generator)
    x.requires_grad_()
    outputs = call(ids, x)
    leaves = [*model.parameters(), x]
    loss = outputs[0] + outputs[1].pow(2).mean() + outputs[3].sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    alone = torch.autograd.grad(call(ids, x)[0], leaves)
    return [o.detach().clone() for o in (*outputs, *first, *second, *alone)]


def run_half(model: Half, call: Callable[..., Any], x: Tensor) -> list[Tensor]:
    loss, wide = call(x)
    gradients = torch.autograd.grad(loss + wide.sum(), list(model.parameters()))
    return [loss.detach(), wide.detach(), *gradients]


@pytest.fixture(scope="module")
def many() -> Many:
    torch.manual_seed(0)
    return Many()


@pytest.fixture(scope="module")
def step(many: Many) -> CompiledBackward:
    ids, x = torch.arange(64) % 48, torch.randn(64, 32, requires_grad=True)
    return retrograd.compile_backward(many, (ids, x), kernels="off")


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_outputs_of_all_kinds_and_variants_of_the_backward(
    many: Many, step: CompiledBackward, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = [run_many(many, step) for _ in range(3)]
    assert_close(clean[0], run_many(many, many))
    for run in clean[1:]:
        assert_same(run, clean[0])
    # Allocators are made at a function's first call: a program that was not called yet is filled from then on.
    ids, x = torch.arange(64) % 48, torch.randn(64, 32, requires_grad=True)
    for value in POISONS:
        with poisoned(monkeypatch, value) as filled:
            again = retrograd.compile_backward(many, (ids, x), kernels="off")
            for _ in range(3):
                assert_same(run_many(many, again), clean[0])
        assert len(filled) > 9


def test_the_first_call_and_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Half(), torch.randn(64, 16)
    clean = run_half(model, retrograd.compile_backward(model, (x,), kernels="off"), x)
    for value in POISONS:
        with poisoned(monkeypatch, value) as filled:
            again = retrograd.compile_backward(model, (x,), kernels="off")
            for _ in range(3):
                assert_same(run_half(model, again, x), clean)
        assert len(filled) > 3


@pytest.mark.long
def test_a_size_that_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Half(), torch.randn(64, 16)
    batch = torch.export.Dim("batch", min=2, max=512)
    step = retrograd.compile_backward(model, (x,), kernels="off", dynamic_shapes=({0: batch},))
    for rows in (64, 7):
        given = torch.randn(rows, 16)
        clean = run_half(model, step, given)
        assert_close(clean, run_half(model, model, given))
        with poisoned(monkeypatch, float("nan")):
            assert_same(run_half(model, step, given), clean)


def test_gradients_that_accumulate_and_that_hooks_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``enable()``, in which a gradient is handed to a hook between functions."""
    torch.manual_seed(0)
    model, x = Half(), torch.randn(64, 16)

    def train(steps: int) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        kept: list[Tensor] = []
        handles = [p.register_hook(kept.append) for p in model.parameters()]
        for _ in range(steps):
            loss, wide = model(x)
            (loss + wide.sum()).backward()
        for handle in handles:
            handle.remove()
        return [*kept, *[p.grad.clone() for p in model.parameters() if p.grad is not None]]

    expected = train(4)
    with retrograd.enable(kernels="off"), poisoned(monkeypatch, float("nan")):
        train(4)
        found = train(4)
    assert_close(found, expected)


def test_the_peak_is_the_predicted_one(many: Many, step: CompiledBackward) -> None:
    run_many(many, step)
    report = step.explain().to_dict()
    assert report["peak_bytes_measured"] == report["peak_bytes_predicted"] > 0
    # Named, and with the lines that compute it, it is as much.
    assert sum(size for size, _ in report["fullest"]) == report["peak_bytes_predicted"]
    assert "in memory then" in str(step.explain())


class Thirds(nn.Module):
    """Gives parts of one tensor, which are copied to their storage."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = self.project(x).view(8, 3, 16).permute(1, 0, 2).contiguous()
        return (parts.sum(), *(parts[i] for i in range(3)))


def test_results_that_are_copied_to_are_known() -> None:
    torch.manual_seed(0)
    model, x = Thirds(), torch.randn(8, 16)
    step = retrograd.compile_backward(model, (x,), verify=False)
    for _ in range(3):
        found = step(x)
        assert all(map(torch.allclose, found, model(x)))
        # NumPy knows none of them.
        assert all(t.untyped_storage().resizable() for t in found)
    function = step._parts.program._current().function("forward_into")
    assert function.copied
    assert not function.copies
