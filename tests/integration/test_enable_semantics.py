# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What PyTorch users do to a backward, each under ``retrograd.enable()`` and beside eager: gradients and order logs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

import retrograd
from retrograd.frontend.autograd.steps.variants import Rehearsed, rehearse
from retrograd.frontend.autograd.tracing.compiler import OrderedCompiler

Log = list[Any]
Step = Callable[[int], Any]
Case = Callable[[Log], tuple[Step, Sequence[torch.Tensor]]]
CASES: dict[str, Case] = {}
# What no graph of tensors can hold: eager, and said so.
EAGER = {"sparse_gradient"}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def leaf(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, requires_grad=True)


@case
def numbers_that_change(log: Log) -> tuple[Step, Sequence[torch.Tensor]]:
    w = leaf(3)
    return lambda i: ((w * (i + 1.5) / (2 + i)) ** 2).sum().backward(), [w]


@case
def zero_grad_both_ways(log: Log) -> tuple[Step, Sequence[torch.Tensor]]:
    m = nn.Linear(3, 3)

    def step(i: int) -> None:
        m.zero_grad(set_to_none=i % 2 == 0)
        m(torch.ones(2, 3)).square().sum().backward()

    return step, list(m.parameters())


@case
def frozen_parameter(log: Log) -> tuple[Step, Sequence[torch.Tensor]]:
    m = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    m[0].weight.requires_grad_(False)
    return lambda i: m(torch.ones(2, 3)).square().sum().backward(), list(m.parameters())


@case
def sparse_gradient(log: Log) -> tuple[Step, Sequence[torch.Tensor]]:
    m = nn.Embedding(5, 3, sparse=True)
    return lambda i: m(torch.tensor([1, 2, 1])).sum().backward(), list(m.parameters())


class SquareOnce(torch.autograd.Function):
    """A function whose backward is not differentiated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = ctx.saved_tensors[0]
        return 2 * x * gradient


@case
def function_differentiable_once(log: Log) -> tuple[Step, Sequence[torch.Tensor]]:
    w = leaf(3)
    return lambda i: SquareOnce.apply(w * 2).sin().sum().backward(), [w]  # type: ignore[no-untyped-call]


@case
def write_to_a_view(log: Log) -> tuple[Step, Sequence[torch.Tensor]]:
    w = leaf(4)

    def step(i: int) -> None:
        y = w * 1
        y[1:3] *= w[:2]
        y[0] = w[3]
        turned = w.expand(3, 4).t() * 1
        turned[1:, ::2].mul_(y.detach()[1:, None])
        turned.view_as(turned).diagonal().sin_()
        flat = w.repeat(3)
        flat.view(3, 4).view(-1)[1::5] = w[:3].exp()
        (y.sin().sum() + (turned * w[:, None]).sum() + flat.square().sum()).backward()

    return step, [w]


class GradInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.detach())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x.requires_grad_()
            result: torch.Tensor = torch.autograd.grad(x.sin(), x, gradient)[0]
        return result


@case
def backward_inside_a_function(log: Log) -> tuple[Step, Sequence[torch.Tensor]]:
    w = leaf(3)
    return lambda i: GradInside.apply(w * 1).sum().backward(), [w]  # type: ignore[no-untyped-call]


@case
def autocast(log: Log) -> tuple[Step, Sequence[torch.Tensor]]:
    m = nn.Linear(8, 8)

    def step(i: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = m(torch.ones(4, 8)).float().sum()
        loss.backward()

    return step, list(m.parameters())


@case
def hook_that_removes_itself(log: Log) -> tuple[Step, Sequence[torch.Tensor]]:
    w = leaf(3)

    def step(i: int) -> None:
        handles: list[torch.utils.hooks.RemovableHandle] = []

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            log.append("hook")
            handles[0].remove()
            return gradient * 2

        handles.append(w.register_hook(hook))
        w.sin().sum().backward()
        w.sin().sum().backward()

    return step, [w]


@case
def hook_that_writes_to_its_gradient(log: Log) -> tuple[Step, Sequence[torch.Tensor]]:
    w = leaf(3)

    def hook(gradient: torch.Tensor) -> None:
        gradient.mul_(2)

    def step(i: int) -> None:
        h = w * 1
        h.register_hook(hook)
        h.sin().sum().backward()

    return step, [w]


@case
def optimizer_in_the_backward(log: Log) -> tuple[Step, Sequence[torch.Tensor]]:
    m = nn.Linear(3, 3)
    for p in m.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)

        def step_now(param: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()
            log.append(tuple(param.shape))

        p.register_post_accumulate_grad_hook(step_now)
    return lambda i: m(torch.ones(2, 3)).square().sum().backward(), list(m.parameters())


@case
def hooks_on_branches(log: Log) -> tuple[Step, Sequence[torch.Tensor]]:
    a, b, c = leaf(3), leaf(3), leaf(3)
    for name, tensor in zip("abc", (a, b, c), strict=True):
        tensor.register_hook(lambda g, n=name: log.append(n))
        tensor.register_post_accumulate_grad_hook(lambda p, n=name: log.append(f"{n} accumulated"))

    def step(i: int) -> None:
        x, y = a.sin() * b, b.cos() * c
        x.register_hook(lambda g: log.append("x"))
        y.register_hook(lambda g: log.append("y"))
        z = x + y * a
        (z + x.exp() + c).sum().backward()

    return step, [a, b, c]


def record(make: Case, enabled: bool) -> tuple[list[Any], Log]:
    torch.manual_seed(0)
    log: Log = []
    step, tensors = make(log)
    states = []
    for i in range(4):
        if enabled:
            with retrograd.enable():
                step(i)
        else:
            step(i)
        grads = [None if t.grad is None else t.grad.to_dense().clone() for t in tensors]
        states.append((grads, [t.detach().clone() for t in tensors]))
    return states, log


@pytest.mark.parametrize("name", list(CASES))
def test_as_eager(name: str) -> None:
    before = len(retrograd.explain_recompiles())
    expected, expected_log = record(CASES[name], enabled=False)
    found, log = record(CASES[name], enabled=True)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)
    assert log == expected_log
    entries = retrograd.explain_recompiles()[before:]
    assert entries
    assert all((entry.outcome == "runs eagerly") == (name in EAGER) for entry in entries), [str(e) for e in entries]
    assert not any("runs in torch" in str(entry) for entry in entries)


def test_gradients_that_are_there_already_need_no_other_program() -> None:
    before = len(retrograd.explain_recompiles())
    m = nn.Linear(3, 3)
    for step in range(20):
        if step % 3 == 0:
            m.zero_grad(set_to_none=step % 2 == 0)
        loss = m(torch.ones(2, 3)).tanh().sum()
        with retrograd.enable():
            loss.backward(retain_graph=step % 4 == 0)
    outcomes = [entry.outcome for entry in retrograd.explain_recompiles()[before:]]
    assert outcomes == ["compiled", "runs what was compiled before"]


def test_gradients_share_no_memory() -> None:
    a, b = leaf(3), leaf(3)
    kept: list[torch.Tensor] = []
    a.register_hook(lambda g: kept.append(g))
    for _ in range(3):
        a.grad = b.grad = None
        with retrograd.enable():
            (a + b).sin().sum().backward()
        gradients: list[Any] = [a.grad, b.grad, kept[-1]]
        assert len({gradient.data_ptr() for gradient in gradients}) == 3


def test_a_program_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from retrograd.runtime.steps.stage_executor import StageExecutor

    run = StageExecutor.run

    def run_wrongly(self: StageExecutor, arguments: Sequence[torch.Tensor], python: Any) -> list[torch.Tensor]:
        return run(self, [a * 1.01 if a.dim() else a for a in arguments], python)

    monkeypatch.setattr(StageExecutor, "run", run_wrongly)
    w = leaf(3)
    for _ in range(3):
        w.grad = None
        with retrograd.enable():
            (w.tan() * 3).sum().backward()
        torch.testing.assert_close(w.grad, 3 / w.detach().cos() ** 2)
    entry = retrograd.explain_recompiles()[-1]
    assert entry.outcome == "runs eagerly"
    assert "the gradient of input" in str(entry)


def double_in_place(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def test_a_recording_copies_gradients_for_hooks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any, one set of them is all that the first step takes besides what eager has."""
    kept: list[dict[int, list[torch.Tensor]]] = []

    def watch(*arguments: Any, **options: Any) -> Rehearsed:
        kept.append(arguments[2].gradients)
        return rehearse(*arguments, **options)

    monkeypatch.setattr("retrograd.frontend.autograd.steps.compilation.rehearse", watch)
    for hooked in (False, True):
        w = leaf(3)
        if hooked:
            w.register_post_accumulate_grad_hook(double_in_place)
        with retrograd.enable():
            w.cos().cos().sum().backward()
        assert w.grad is not None
        (gradient,) = [gradient for given in kept.pop().values() for gradient in given]
        torch.testing.assert_close(gradient * (2 if hooked else 1), w.grad)
        assert (gradient.data_ptr() == w.grad.data_ptr()) != hooked


def test_anomaly_mode_runs_eagerly_and_names_the_op() -> None:
    w = leaf(3)
    captures = len(retrograd.explain_recompiles())
    with retrograd.enable(), pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        (w * 2).sum().backward()
        assert w.grad is not None and w.grad.tolist() == [2.0] * 3
        with pytest.raises(RuntimeError, match="'MulBackward0' returned nan"):
            (w * 0).sqrt().sum().backward()
    assert {str(e).partition(": ")[2] for e in retrograd.explain_recompiles()[captures:]} == {
        "a backward is left to PyTorch's engine: anomaly mode is on"
    }


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_a_gradient_that_is_asked_for_is_the_one_before_the_hooks_of_its_tensor(alone: bool, edges: bool) -> None:
    """Where its node runs, for what is behind it; else the one that they made of it. PyTorch's capture gives that in
    any case."""

    def steps() -> list[tuple[torch.Tensor, ...]]:
        torch.manual_seed(0)
        w, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)
        found = []
        for number in range(4):
            y = (x @ w).tanh()
            z = y.exp()
            y.retain_grad()
            for factor in (1.5, 0.75 + number):
                y.register_hook(lambda gradient, factor=factor: factor * gradient)
            z.register_hook(lambda gradient: 3 * gradient)
            asked: Any = (y, z) if alone else (w, y, z)
            if edges:
                asked = tuple([get_gradient_edge(tensor) for tensor in asked])
            found.append((*torch.autograd.grad((y * z).sum(), asked), y.grad))
        return found

    exact, before = steps(), len(retrograd.explain_recompiles())
    with retrograd.enable():
        found = steps()
    for mine, right in zip(found, exact, strict=True):
        for one, other in zip(mine, right, strict=True):
            torch.testing.assert_close(one, other)
    outcomes = {entry.outcome for entry in retrograd.explain_recompiles()[before:]}
    assert outcomes <= {"compiled", "runs what was compiled before"}


def test_steps_leave_nothing_behind() -> None:
    w = leaf(3)
    w.register_hook(lambda g: g * 2)

    def run(steps: int) -> int:
        for _ in range(steps):
            w.grad = None
            (w.cosh()).sum().backward()
        gc.collect()
        return len(gc.get_objects())

    with retrograd.enable():
        run(5)
        gc.disable()
        try:
            before = run(1)
            assert run(300) <= before + 50
        finally:
            gc.enable()


def test_a_first_step_is_traced_once_and_frees_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch is asked for the graph again, to free it, and finds the capture that ran, though there are gradients
    now."""
    traced: list[OrderedCompiler] = []
    begin = OrderedCompiler.begin_capture

    def count(compiler: OrderedCompiler, *args: Any) -> Any:
        traced.append(compiler)
        return begin(compiler, *args)

    monkeypatch.setattr(OrderedCompiler, "begin_capture", count)
    torch._C._dynamo.compiled_autograd.clear_cache()
    w = leaf(3)
    with retrograd.enable():
        loss = w.sin().sum()
        loss.backward()
        assert len(traced) == 1
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    torch.testing.assert_close(w.grad, w.detach().cos())


def test_saved_tensors_are_freed_where_eager_frees_them() -> None:
    alive: list[list[bool]] = []
    saved: list[weakref.ref[torch.Tensor]] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            alive.append([reference() is not None for reference in saved])
            return gradient

    def step(w: torch.Tensor) -> None:
        early, late = torch.rand(3), torch.rand(3)
        saved[:] = [weakref.ref(early), weakref.ref(late)]
        x: Any = Look.apply(w)  # type: ignore[no-untyped-call]
        y: Any = Look.apply(x * early)  # type: ignore[no-untyped-call]
        loss = (y * late).sum()
        del early, late, x, y
        loss.backward()

    w = leaf(3)
    step(w)
    expected, alive[:] = list(alive), []
    with retrograd.enable():
        for _ in range(3):
            w.grad, alive[:] = None, []
            step(w)
    assert alive == expected == [[True, False], [False, False]]
