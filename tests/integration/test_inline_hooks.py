# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Hooks marked as inlineable, as part of the compiled backward: eager's gradients, and their Python called no more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from io import StringIO
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import retrograd
from retrograd.frontend.autograd.steps import known_variants

Setup = Callable[[Any], None]
STEPS = 4


@pytest.fixture(autouse=True)
def room_for_all_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models here are of one structure, and live on: PyTorch does not see that a hook and its parameter know each
    other."""
    monkeypatch.setattr(known_variants, "MOST_VARIANTS", 64)


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
            before = CALLS.tell()
            with context:
                loss.backward()
            calls[index] = CALLS.tell() - before
        eager, ours = ([p.grad for p in model.parameters()] for model in self.models)
        torch.testing.assert_close(ours, eager, rtol=2e-5, atol=1e-6)
        assert calls[0] > 0
        return calls[1]


# Text in C: a number or list that the hooks changed would make them others at each step, and an iterator is not read.
CALLS = StringIO()


def outcomes(since: int) -> list[str]:
    return [entry.outcome for entry in retrograd.explain_recompiles()[since:]]


def test_tensor_hooks_read_their_tensors_at_each_step() -> None:
    scale = torch.tensor(2.0)

    @retrograd.inlineable
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        CALLS.write(".")
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
        CALLS.write(".")
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
        CALLS.write(".")
        return tuple(g * 2 for g in gradients)

    @retrograd.inlineable
    def after(inputs: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor]) -> Any:
        CALLS.write(".")
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
    beside = Beside(lambda model: model[2].weight.register_hook(lambda g: CALLS.write(".") and None))
    for model in beside.models:
        model[2].weight.register_hook(hook)
    before = len(retrograd.explain_recompiles())
    assert [beside.step() for _ in range(3)] == [1, 1, 1]
    assert not any("called in Python" in str(entry) for entry in retrograd.explain_recompiles()[before:])


def unpack_bf16(packed: torch.Tensor) -> torch.Tensor:
    CALLS.write(".")
    return packed.float()


def unpack_fp8(packed: tuple[torch.Tensor, torch.Tensor, torch.dtype]) -> torch.Tensor:
    CALLS.write(".")
    value, scale, dtype = packed
    return value.to(dtype) * scale


def pack_fp8(tensor: torch.Tensor) -> Any:
    scale = tensor.abs().amax().clamp_min(1e-12) / 448
    return (tensor / scale).to(torch.float8_e4m3fn), scale, tensor.dtype


@pytest.mark.long_cases("bf16")
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


def test_packed_values_are_freed_after_their_last_use() -> None:
    """Others that have them keep them, and a graph that is run again does."""
    storages: list[torch.UntypedStorage] = []
    kept: list[torch.Tensor] = []
    users: list[list[int]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed = tensor.double()
        storages.append(packed.untyped_storage())
        if len(storages) > 1:
            kept.append(packed)
        return packed

    def look(_: torch.Tensor) -> None:
        # A storage has one user here: the list of this test.
        users.append([torch._C._storage_Use_Count(storage._cdata) for storage in storages])

    w = torch.randn(3, requires_grad=True)

    def step(again: bool) -> None:
        for known in (storages, kept, users):
            known.clear()
        first = w * 1
        first.register_hook(look)
        with saved_tensors_hooks(pack, retrograd.inlineable(lambda packed: packed.float())):
            loss = first.sin().cos().sum()
        w.grad = None
        with retrograd.enable():
            loss.backward(retain_graph=again)
        expected = -w.detach().sin().sin() * w.detach().cos()
        torch.testing.assert_close(w.grad, expected, rtol=2e-5, atol=1e-6)
        if again:
            with retrograd.enable():
                loss.backward()
            torch.testing.assert_close(w.grad, 2 * expected, rtol=2e-5, atol=1e-6)

    step(again=False)
    for again in (False, True):
        step(again)
        saved = [tensor.detach().float() for tensor in kept]
        torch.testing.assert_close(saved, [w.detach().sin()])
        assert users[0] == [2, 2] if again else users[0] == [1, 2], users


def test_why_a_marked_hook_is_called_in_python() -> None:
    kept = [torch.zeros(())]

    @retrograd.inlineable
    def reads_a_number(gradient: torch.Tensor) -> torch.Tensor:
        CALLS.write(".")
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


@pytest.mark.long
def test_hooks_of_dead_models_make_room_for_others() -> None:
    """Variants are known by the hook's tensors; those of tensors that are gone are not kept."""
    before = len(retrograd.explain_recompiles())
    for number in range(10):
        scale = torch.tensor(float(number))

        def hook(gradient: torch.Tensor, scale: torch.Tensor = scale) -> torch.Tensor:
            CALLS.write(".")
            return gradient * scale

        beside = Beside(lambda model, hook=hook: model[2].bias.register_hook(retrograd.inlineable(hook)))  # type: ignore[misc]
        assert [beside.step() for _ in range(2)] == [1, 0]
        del beside, hook, scale
    assert "runs eagerly" not in outcomes(before)


def test_a_mark_on_a_method_is_a_partial() -> None:
    class Owner:
        def hook(self, gradient: torch.Tensor) -> torch.Tensor:
            CALLS.write(".")
            return gradient * 2

    marked = retrograd.inlineable(Owner().hook)
    beside = Beside(lambda model: model[2].bias.register_hook(marked))
    assert [beside.step() for _ in range(2)] == [1, 0]


def train_in_the_backward(make: Callable[[nn.Parameter], torch.optim.Optimizer], steps: int, decay: float) -> list[int]:
    """Two models whose optimizers step in hooks, one of them inlined; they stay equal. Returns the calls of hooks.

    ``decay`` is what learning rates are multiplied by after each step.
    """
    models = nn.Linear(4, 3), nn.Linear(4, 3)
    models[1].load_state_dict(models[0].state_dict())
    schedules = []
    for model, inlined in zip(models, (False, True), strict=True):
        optimizers = {parameter: make(parameter) for parameter in model.parameters()}

        def step(parameter: nn.Parameter, optimizers: Any = optimizers) -> None:
            CALLS.write(".")
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(retrograd.inlineable(step) if inlined else step)
        schedules += [torch.optim.lr_scheduler.ExponentialLR(o, decay) for o in optimizers.values()]
    calls = []
    for _ in range(steps):
        x = torch.randn(5, 4)
        models[0](x).square().mean().backward()
        before = CALLS.tell()
        with retrograd.enable():
            models[1](x).square().mean().backward()
        calls.append(CALLS.tell() - before)
        for schedule in schedules:
            schedule.step()
        assert all(parameter.grad is None for parameter in models[1].parameters())
    for ours, eager in zip(*(model.parameters() for model in reversed(models)), strict=True):
        assert float((ours - eager).detach().norm()) <= 2e-5 * float(eager.detach().norm())
    return calls


OPTIMIZERS: dict[str, Callable[[nn.Parameter], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD([p], lr=0.1),
    "momentum": lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9, nesterov=True),
    "momentum_foreach": lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW([p], lr=0.01),
    "adamw_foreach": lambda p: torch.optim.AdamW([p], lr=0.01, foreach=True),
}


@pytest.mark.short_cases("sgd", "adamw_foreach")
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizers_step_in_the_compiled_backward(name: str) -> None:
    """With learning rates that a schedule changes: they are read at each step."""
    calls = train_in_the_backward(OPTIMIZERS[name], 12, decay=0.8)
    # Recorded once more after the step in which the state is set up; plain SGD has none.
    assert calls == ([2, *[0] * 11] if name == "sgd" else [2, 2, *[0] * 10])


@pytest.mark.short_cases("momentum_foreach")
@pytest.mark.parametrize("name", ["momentum_foreach", "adamw"])
def test_torch_counts_the_writes_of_an_inlined_optimizer(name: str) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = OPTIMIZERS[name](parameter)

    @retrograd.inlineable
    def step(_: torch.Tensor) -> None:
        optimizer.step()

    parameter.register_post_accumulate_grad_hook(step)
    for _ in range(4):
        version = parameter._version
        parameter.grad = None
        with retrograd.enable():
            parameter.sin().sum().backward()
        assert parameter._version > version


def test_a_hook_that_scales_the_gradient_in_place() -> None:
    def setup(model: Any) -> None:
        for parameter in model.parameters():

            @retrograd.inlineable
            def hook(parameter: torch.Tensor) -> None:
                CALLS.write(".")
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)

            parameter.register_post_accumulate_grad_hook(hook)

    beside = Beside(setup)
    assert [beside.step() for _ in range(3)] == [4, 0, 0]


def test_a_gradient_that_is_there_already_is_left_to_python() -> None:
    """The hook sees the sum, which the backward does not compute."""
    before = len(retrograd.explain_recompiles())
    parameters = [torch.ones(3, requires_grad=True) for _ in range(2)]
    for parameter in parameters:

        @retrograd.inlineable
        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

        parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(4):
        parameters[0].sin().sum().backward()
        with retrograd.enable():
            parameters[1].sin().sum().backward()
        torch.testing.assert_close(parameters[1].grad, parameters[0].grad)
    entries = [str(entry) for entry in retrograd.explain_recompiles()[before:]]
    assert any("its parameter has a gradient already" in entry for entry in entries)
    assert not any("runs eagerly" in entry for entry in entries)


def test_an_update_waits_for_those_that_read_the_parameter() -> None:
    """The gradient of the input is computed from the weight as it was, also where it is needed last."""

    def setup(model: Any) -> None:
        @retrograd.inlineable
        def hook(parameter: torch.Tensor) -> None:
            CALLS.write(".")
            assert parameter.grad is not None
            parameter.sub_(parameter.grad)
            parameter.grad = None

        model[2].weight.register_post_accumulate_grad_hook(hook)

    beside = Beside(setup)
    assert [beside.step() for _ in range(4)] == [1, 0, 0, 0]
    ours, eager = (list(model.parameters()) for model in reversed(beside.models))
    torch.testing.assert_close(ours, eager, rtol=2e-5, atol=1e-6)


def test_any_error_of_the_compiler_leaves_the_step_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("retrograd.frontend.autograd.steps.compilation.trace_backward", fail)
    before = len(retrograd.explain_recompiles())
    parameter = torch.ones(3, requires_grad=True)
    for _ in range(3):
        parameter.grad = None
        with retrograd.enable():
            (parameter.erf() * 7).sum().backward()
        assert parameter.grad is not None
    (entry,) = retrograd.explain_recompiles()[before:]
    assert entry.outcome == "runs eagerly" and "KeyError: 'lost'" in str(entry)
