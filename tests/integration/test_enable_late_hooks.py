# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Hooks that Python puts on tensors, or takes off, while a backward runs that calls it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import retrograd
from retrograd.frontend.autograd.engine.late_hooks import LateHook
from retrograd.frontend.autograd.hooks.putting_hooks import find_putting

STEPS = 5
Log = list[Any]


class Puts:
    """Puts hooks on tensors where no name in a hook's code says so."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def scale(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        self.log.append(name)
        return gradient * 3

    def on(self, tensor: torch.Tensor, name: str) -> Any:
        return tensor.register_hook(lambda gradient: self.scale(name, gradient))

    def behind(self, leaf: torch.Tensor, name: str) -> Any:
        return leaf.register_post_accumulate_grad_hook(lambda it: self.log.append((name, it.grad is not None)))


def then(puts: Puts, name: str, do: Callable[[], Any]) -> Callable[[torch.Tensor], None]:
    """A hook that logs its name and does something."""

    def hook(gradient: torch.Tensor) -> None:
        puts.log.append(name)
        do()

    return hook


def on_leaves(leaves: list[torch.Tensor], puts: Puts, step: int) -> torch.Tensor:
    w, v, u = leaves
    x = (w * v).sin()

    def put() -> None:
        puts.on(w, "w")
        puts.behind(v, "v")

    x.register_hook(then(puts, "x", put))
    return (x * u).exp().sum()


def on_leaves_later(leaves: list[torch.Tensor], puts: Puts, step: int) -> torch.Tensor:
    """From a step on that runs compiled."""
    w, v, u = leaves
    x = (w * v).cos()

    def put() -> None:
        if step > 2:
            puts.on(w, "w").remove()
            puts.on(w, "w again")
            puts.behind(v, "v")

    x.register_hook(then(puts, "x", put))
    return (x * u).exp().mean()


def by_name(leaves: list[torch.Tensor], puts: Puts, step: int) -> torch.Tensor:
    """On a tensor that is computed; the code of the hook says so."""
    w, v, u = leaves
    inner = w * v
    x = inner.tanh()
    x.register_hook(lambda _: (inner.register_hook(partial(puts.scale, "inner")), None)[1])
    return (x * u).sum()


def in_a_function(leaves: list[torch.Tensor], puts: Puts, step: int) -> torch.Tensor:
    w, v, u = leaves

    def put() -> None:
        v.register_hook(partial(puts.scale, "v"))

    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            put()
            return gradients[0] * 2

    doubled: Any = Doubles.apply((w * v).sin())  # type: ignore[no-untyped-call]
    loss: torch.Tensor = (doubled * u).sum()
    return loss


def taken_off(leaves: list[torch.Tensor], puts: Puts, step: int) -> torch.Tensor:
    w, v, u = leaves
    inner = w * v
    handles = [puts.on(inner, "inner"), puts.on(w, "w"), puts.behind(v, "v")]

    def remove() -> None:
        for handle in handles if step > 1 else ():
            handle.remove()

    x = inner.sin()
    x.register_hook(then(puts, "x", remove))
    return (x * u).square().sum()


def by_itself(leaves: list[torch.Tensor], puts: Puts, step: int) -> torch.Tensor:
    w, v, u = leaves
    inner = w * v
    handles: list[Any] = []
    handles.append(inner.register_hook(then(puts, "inner", lambda: handles[0].remove())))
    return (inner.sin() * u).exp().sum()


def of_the_same_tensor(leaves: list[torch.Tensor], puts: Puts, step: int, since: int) -> torch.Tensor:
    """The hooks of a tensor are called as they were when the first of them was."""
    w, v, u = leaves
    handles: list[Any] = []

    def change() -> None:
        if step >= since:
            handles.pop().remove()
            handles.pop().remove()
            puts.on(w, "put")

    handles.append(w.register_hook(then(puts, "first", change)))
    handles.append(puts.on(w, "second"))
    return apart((w * v).sin().exp() * u, since)


def of_a_tensor_outside(leaves: list[torch.Tensor], puts: Puts, step: int, since: int) -> torch.Tensor:
    """A hook is taken off a tensor that has no part in the backward, and stays on the one that has."""
    w, v, u = leaves
    scale, outside = partial(puts.scale, "shared"), torch.ones(2, requires_grad=True)
    w.register_hook(scale)
    handle = outside.register_hook(scale)

    def change() -> None:
        if step >= since:
            handle.remove()
            assert not outside._backward_hooks

    x = (w * v).sin().tanh()
    x.register_hook(then(puts, "x", change))
    return apart(x * u, since)


def put_again(leaves: list[torch.Tensor], puts: Puts, step: int, since: int) -> torch.Tensor:
    w, v, u = leaves
    scale = partial(puts.scale, "again")
    handle = w.register_hook(scale)

    def change() -> None:
        if step >= since:
            handle.remove()
            getattr(w, "_".join(["register", "hook"]))(scale)

    x = (w * v).sin().cos().neg().exp()
    x.register_hook(then(puts, "x", change))
    return apart(x * u, since)


def shared_and_off_all(leaves: list[torch.Tensor], puts: Puts, step: int, since: int) -> torch.Tensor:
    """One hook of two leaves takes itself off both at its first call."""
    w, v, u = leaves
    handles: list[Any] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        for handle in handles if step >= since else ():
            handle.remove()
        return puts.scale("shared", gradient)

    handles.extend([w.register_hook(hook), v.register_hook(hook)])
    return apart((w * v).sin().sin().abs() * u, since)


def apart(x: torch.Tensor, since: int) -> torch.Tensor:
    """A loss by which programs are told apart that change hooks since another step."""
    return x.exp().sum() if since else x.exp().mean()


def run(program: Any, enabled: bool) -> list[Any]:
    """What each step leaves and logs."""
    left = []
    for step in range(STEPS):
        torch.manual_seed(0)
        leaves, log = [torch.randn(4, requires_grad=True) for _ in range(3)], Log()
        with retrograd.enable() if enabled else nullcontext():
            program(leaves, Puts(log), step).backward()
        left.append(([leaf.grad for leaf in leaves], log))
    return left


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        (on_leaves, "runs eagerly"),
        (on_leaves_later, "compiled"),
        (by_name, "runs eagerly"),
        (in_a_function, "runs eagerly"),
        (taken_off, "compiled"),
        (by_itself, "compiled"),
        *[
            (partial(program, since=since), "compiled" if since else outcome)
            for program, outcome in (
                (of_the_same_tensor, "compiled"),
                (of_a_tensor_outside, "runs eagerly"),
                (put_again, "runs eagerly"),
                (shared_and_off_all, "runs eagerly"),
            )
            for since in (0, 2)
        ],
    ],
)
def test_take_effect_at_once(program: Any, outcome: str) -> None:
    before = len(retrograd.explain_recompiles())
    found, expected = run(program, True), run(program, False)
    for (mine, my_log), (theirs, their_log) in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert my_log == their_log
    assert [entry.outcome for entry in retrograd.explain_recompiles()[before:]] == [outcome]


def _shared_and_taken_off(leaves: list[torch.Tensor], puts: Puts, step: int) -> torch.Tensor:
    w, v, u = leaves
    scale = partial(puts.scale, "shared")
    handles = [w.register_hook(scale), v.register_hook(scale)]
    x = (w * v).sin()
    x.register_hook(then(puts, "x", lambda: handles[1].remove() if step == 2 else None))
    return (x * u).abs().sum()


def _put_on_what_is_computed(leaves: list[torch.Tensor], puts: Puts, step: int) -> torch.Tensor:
    w, v, u = leaves
    inner = w * v
    x = inner.sin()
    x.register_hook(then(puts, "x", lambda: puts.on(inner, "inner") if step == 2 else None))
    return (x * u).abs().mean()


def _shared_with_what_is_computed(leaves: list[torch.Tensor], puts: Puts, step: int) -> torch.Tensor:
    """The hook takes itself off both tensors, not told by any leaf."""
    w, v, u = leaves
    handles: list[Any] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        for handle in handles if step == 2 else ():
            handle.remove()
        return puts.scale("shared", gradient)

    inner = w * v
    handles.extend([inner.register_hook(hook), v.register_hook(hook)])
    return (inner.sin() * u).abs().exp().sum()


def _shared_twice_by_one(leaves: list[torch.Tensor], puts: Puts, step: int) -> torch.Tensor:
    """Both calls are made in eager: the tensor's hooks are called as they were at the first."""
    w, v, u = leaves
    handles: list[Any] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        for handle in handles if step == 2 else ():
            handle.remove()
        return puts.scale("twice", gradient)

    handles.extend([w.register_hook(hook), w.register_hook(hook)])
    return ((w * v).sin() * u).abs().exp().mean()


@pytest.mark.parametrize(
    "program",
    [_shared_and_taken_off, _put_on_what_is_computed, _shared_with_what_is_computed, _shared_twice_by_one],
)
def test_what_cannot_take_effect_is_told_and_the_step_repeated_eagerly(program: Any) -> None:
    def step(number: int, enabled: bool) -> Any:
        torch.manual_seed(0)
        leaves, log = [torch.randn(4, requires_grad=True) for _ in range(3)], Log()
        with retrograd.enable() if enabled else nullcontext():
            program(leaves, Puts(log), number).backward()
        return [leaf.grad for leaf in leaves], log

    def assert_as_eager(number: int) -> None:
        (mine, my_log), (theirs, their_log) = step(number, True), step(number, False)
        torch.testing.assert_close(mine, theirs)
        assert my_log == their_log

    for number in range(2):
        assert_as_eager(number)
    with pytest.raises(LateHook, match="repeat the step"):
        step(2, True)
    for number in (2, 2, 3):
        assert_as_eager(number)


def test_code_that_puts_hooks_on_tensors_is_found_where_it_is_called_by_name() -> None:
    def put(tensor: torch.Tensor) -> None:
        tensor.retain_grad()

    def calls(tensor: torch.Tensor) -> None:
        put(tensor)

    def does_not(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.abs()

    assert find_putting([does_not, partial(calls)]) is not None
    assert find_putting([does_not, Puts([]).scale]) is None
