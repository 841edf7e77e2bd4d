# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Hooks marked as inlineable, as part of the compiled backward: eager's gradients, and their Python called no more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import retrograd

Setup = Callable[[Any], None]
STEPS = 4


def make_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))


class Beside:
    """One model in eager and an equal one under ``retrograd.enable()``; hooks count their calls on ``calls``."""

    def __init__(self, setup: Setup) -> None:
        self.models = make_model(), make_model()
        for model in self.models:
            setup(model)

    def step(self, forward: Callable[[Any, torch.Tensor], Any] = lambda model, x: model(x)) -> int:
        """One step of each, whose gradients are equal; returns how often Python was called in the compiled one."""
        x = torch.randn(5, 4)
        calls = [0, 0]
        contexts: Sequence[AbstractContextManager[None]] = (contextlib.nullcontext(), retrograd.enable())
        for index, (model, context) in enumerate(zip(self.models, contexts, strict=True)):
            model.zero_grad()
            loss = forward(model, x).square().mean()
            before = next(CALLS)
            with context:
                loss.backward()
            calls[index] = next(CALLS) - before - 1
        eager, ours = ([p.grad for p in model.parameters()] for model in self.models)
        torch.testing.assert_close(ours, eager, rtol=2e-5, atol=1e-6)
        assert calls[0] > 0
        return calls[1]


# Counted in C: a number or list that the hooks changed would make them others at each step.
CALLS = count()


def outcomes(since: int) -> list[str]:
    return [entry.outcome for entry in retrograd.explain_recompiles()[since:]]


def test_tensor_hooks_read_their_tensors_at_each_step() -> None:
    scale = torch.tensor(2.0)

    @retrograd.inlineable
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        next(CALLS)
        return gradient * scale + gradient.mean()

    beside = Beside(lambda model: model[0].weight.register_hook(hook))
    calls = []
    for _ in range(STEPS):
        calls.append(beside.step())
        scale.add_(1)
    assert calls == [1, 0, 0, 0]


def test_another_hook_or_number_at_the_same_place_is_another_program() -> None:
    number = 2.0

    @retrograd.inlineable
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        next(CALLS)
        return gradient * number

    beside = Beside(lambda model: model[0].weight.register_hook(hook))
    assert [beside.step() for _ in range(2)] == [1, 0]
    number = 3.0
    assert [beside.step() for _ in range(2)] == [1, 0]
    number = 2.0
    assert beside.step() == 0


def test_nodes_hooks_and_hooks_that_stay_in_python() -> None:
    log: list[str] = []

    @retrograd.inlineable
    def before(gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        next(CALLS)
        return tuple(g * 2 for g in gradients)

    @retrograd.inlineable
    def after(inputs: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor]) -> Any:
        next(CALLS)
        return tuple(None if g is None else g + outputs[0].sum() for g in inputs)

    def forward(model: Any, x: torch.Tensor) -> Any:
        y = model(x)
        y.register_hook(lambda g: log.append("hook"))
        y.grad_fn.register_prehook(before)
        y.grad_fn.register_hook(after)
        return y

    beside = Beside(lambda model: None)
    assert [beside.step(forward) for _ in range(3)] == [2, 0, 0]
    assert log == ["hook"] * 6


def test_pytorchs_own_mark() -> None:
    hook = torch.fx.symbolic_trace(lambda g: g.sin() * 3)
    beside = Beside(lambda model: model[2].weight.register_hook(lambda g: next(CALLS) and None))
    for model in beside.models:
        model[2].weight.register_hook(hook)
    before = len(retrograd.explain_recompiles())
    assert [beside.step() for _ in range(3)] == [1, 1, 1]
    assert not any("called in Python" in str(entry) for entry in retrograd.explain_recompiles()[before:])


def unpack_bf16(packed: torch.Tensor) -> torch.Tensor:
    next(CALLS)
    return packed.float()


def unpack_fp8(packed: tuple[torch.Tensor, torch.Tensor, torch.dtype]) -> torch.Tensor:
    next(CALLS)
    value, scale, dtype = packed
    return value.to(dtype) * scale


def pack_fp8(tensor: torch.Tensor) -> Any:
    scale = tensor.abs().amax().clamp_min(1e-12) / 448
    return (tensor / scale).to(torch.float8_e4m3fn), scale, tensor.dtype


@pytest.mark.parametrize(
    ("pack", "unpack"), [(lambda t: t.bfloat16(), unpack_bf16), (pack_fp8, unpack_fp8)], ids=["bf16", "fp8"]
)
def test_unpack_hooks(pack: Any, unpack: Any) -> None:
    def forward(model: Any, x: torch.Tensor) -> Any:
        with saved_tensors_hooks(pack, retrograd.inlineable(unpack)):
            return model(x)

    beside = Beside(lambda model: None)
    calls = [beside.step(forward) for _ in range(3)]
    assert calls[0] > 0 and calls[1:] == [0, 0]


def test_why_a_marked_hook_is_called_in_python() -> None:
    kept = [torch.zeros(())]

    @retrograd.inlineable
    def reads_a_number(gradient: torch.Tensor) -> torch.Tensor:
        next(CALLS)
        return gradient * gradient.sum().item()

    @retrograd.inlineable
    def writes(gradient: torch.Tensor) -> None:
        kept[0].add_(1)

    @retrograd.inlineable
    def draws(gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.rand_like(gradient) * 0

    def setup(model: Any) -> None:
        for parameter, hook in zip(model.parameters(), (reads_a_number, writes, draws), strict=False):
            parameter.register_hook(hook)

    beside = Beside(setup)
    before = len(retrograd.explain_recompiles())
    assert [beside.step() for _ in range(2)] == [1, 1]
    (entry,) = retrograd.explain_recompiles()[before:]
    assert "reads_a_number (" in str(entry) and "test_inline_hooks.py" in str(entry)
    for reason in ("reads a number from a tensor", "writes to a tensor", "draws random numbers"):
        assert reason in str(entry)


def test_hooks_of_dead_models_make_room_for_others() -> None:
    """Variants are known by the hook's tensors; those of tensors that are gone are not kept."""
    before = len(retrograd.explain_recompiles())
    for number in range(10):
        scale = torch.tensor(float(number))

        def hook(gradient: torch.Tensor, scale: torch.Tensor = scale) -> torch.Tensor:
            next(CALLS)
            return gradient * scale

        beside = Beside(lambda model, hook=hook: model[2].bias.register_hook(retrograd.inlineable(hook)))  # type: ignore[misc]
        assert [beside.step() for _ in range(2)] == [1, 0]
        del beside, hook, scale
    assert "runs eagerly" not in outcomes(before)


def test_a_mark_on_a_method_is_a_partial() -> None:
    class Owner:
        def hook(self, gradient: torch.Tensor) -> torch.Tensor:
            next(CALLS)
            return gradient * 2

    marked = retrograd.inlineable(Owner().hook)
    beside = Beside(lambda model: model[2].bias.register_hook(marked))
    assert [beside.step() for _ in range(2)] == [1, 0]
