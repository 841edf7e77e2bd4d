# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Python values that change between the steps of ``retrograd.enable()``: a compiled backward never uses those before.

Each program makes its leaves and a step, which is told its number; steps run eagerly and inside of ``enable()``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import pytest
import torch

import retrograd

Program = Callable[[], tuple[list[torch.Tensor], Callable[[int], Any]]]
PROGRAMS: dict[str, Program] = {}
_factor = 1.0


def program(function: Program) -> Program:
    """Adds a program to those that are tried."""
    PROGRAMS[function.__name__] = function
    return function


def leaf(*sizes: int) -> Any:
    return torch.randn(*sizes, requires_grad=True)


def function(backward: Callable[..., Any], forward: Callable[..., Any] = lambda ctx, a: a * 1.0) -> Any:
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    made: Any = type("Made", (torch.autograd.Function,), members)
    return made


@program
def a_global_in_a_function() -> Any:
    w, made = leaf(4), function(lambda ctx, g: g * _factor)

    def step(number: int) -> None:
        global _factor
        _factor = number + 1.0
        made.apply(w * 2).sum().backward()

    return [w], step


@program
def a_number_on_a_context() -> Any:
    def forward(ctx: Any, a: torch.Tensor, k: float) -> torch.Tensor:
        ctx.k = k
        return a * k

    w, made = leaf(4), function(lambda ctx, g: (g * ctx.k, None), forward)
    return [w], lambda number: made.apply(w, number + 0.5).sin().sum().backward()


@program
def a_tensor_that_is_written_to() -> Any:
    w, t = leaf(4), torch.ones(4)
    made = function(lambda ctx, g: g * t)

    def step(number: int) -> None:
        t.mul_(1.5)
        made.apply(w).exp().sum().backward()

    return [w], step


@program
def a_backward_that_is_replaced() -> Any:
    w, made = leaf(8), function(lambda ctx, g: g * 2)

    def step(number: int) -> None:
        made.backward = staticmethod([lambda ctx, g: g * 2, lambda ctx, g: g * 3][number % 2])
        made.apply(w).sin().sum().backward()

    return [w], step


@program
def gradients_of_another_type() -> Any:
    w, kind = leaf(8), [torch.float32]
    made = function(lambda ctx, g: (g * 2).to(kind[0]))

    def step(number: int) -> None:
        kind[0] = torch.float64 if number >= 3 else torch.float32
        made.apply(w * 2).sin().sum().backward()

    return [w], step


@program
def gradients_of_a_larger_size() -> Any:
    w, rows = leaf(8), [0]
    made = function(lambda ctx, g: (g * 2)[None].expand(rows[0], 8) if rows[0] else g * 2)

    def step(number: int) -> None:
        rows[0] = 3 if number >= 3 else 0
        made.apply(w * 2).sin().sum().backward()

    return [w], step


@program
def one_gradient_given_twice() -> Any:
    w, v, twice = leaf(4), leaf(4), [False]

    def backward(ctx: Any, g: torch.Tensor) -> Any:
        h = g * 2
        return (h, h) if twice[0] else (h, g * 3)

    made = function(backward, lambda ctx, a, b: a * b)

    def step(number: int) -> None:
        twice[0] = number >= 3
        made.apply(w, v).sin().sum().backward()

    return [w, v], step


@program
def a_marked_hook_that_reads_the_gradient_of_another_leaf() -> Any:
    w, v = leaf(4), leaf(4)
    w.register_hook(retrograd.inlineable(lambda g: g * (1.0 if v.grad is None else v.grad)))
    return [w, v], lambda number: (w.sin() + v * number).sum().backward()


def marked(make: Callable[[], tuple[Callable[[torch.Tensor], Any], Callable[[int], Any]]]) -> Program:
    """A program with a marked hook, and what changes between its steps."""

    def made() -> Any:
        w = leaf(4)
        hook, change = make()
        w.register_hook(retrograd.inlineable(hook))

        def step(number: int) -> None:
            change(number)
            (w * 2).sin().sum().backward()

        return [w], step

    made.__name__ = make.__name__
    return program(made)


@marked
def a_marked_hooks_dict() -> Any:
    state = {"k": 1.0}
    return lambda g: g * state["k"], lambda number: state.update(k=number + 0.5)


@marked
def a_marked_hooks_default() -> Any:
    def hook(g: torch.Tensor, k: float = 1.0) -> torch.Tensor:
        return g * k

    return hook, lambda number: setattr(hook, "__defaults__", (number + 0.5,))


@marked
def a_marked_hooks_item() -> Any:
    t = torch.ones(1)
    return lambda g: g * t.item(), lambda number: t.fill_(number + 0.25)


@marked
def a_marked_hooks_iterator() -> Any:
    numbers = iter(range(100))
    return lambda g: g * next(numbers), lambda number: None


@marked
def a_marked_hooks_function() -> Any:
    state: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"f": torch.sin}
    functions = [torch.sin, torch.cos, torch.exp]
    return lambda g: state["f"](g), lambda number: state.update(f=functions[number % 3])


@marked
def a_marked_hooks_branch_on_a_tensor() -> Any:
    t = torch.ones(1)
    return lambda g: g * 2 if bool(t > 0) else g * 3, lambda number: t.fill_((-1) ** number)


@marked
def a_marked_hooks_length() -> Any:
    kept: list[int] = []
    return lambda g: g * len(kept), kept.append


@marked
def a_marked_hooks_cached_function() -> Any:
    state = {"k": 1.0}
    cached = lru_cache(lambda: state["k"])

    def change(number: int) -> None:
        # The cache is emptied a step after what it holds has changed.
        if number % 2:
            state["k"] = number + 0.5
        elif number > 2:
            cached.cache_clear()

    return lambda g: g * cached(), change


@marked
def a_marked_hooks_cached_method() -> Any:
    class Schedule:
        k = 1.0

        @lru_cache  # noqa: B019
        def factor(self) -> float:
            return self.k

    schedule = Schedule()

    def change(number: int) -> None:
        schedule.k = number + 0.5
        Schedule.factor.cache_clear()

    return lambda g: g * schedule.factor(), change


@marked
def a_marked_hooks_bound_method_of_a_dict() -> Any:
    state = {"k": 1.0}
    get = state.get
    return lambda g: g * get("k", 0.0), lambda number: state.update(k=number + 0.5)


@marked
def a_marked_hooks_bound_next() -> Any:
    following = iter(range(100)).__next__
    return lambda g: g * following(), lambda number: None


def run(name: str, enabled: bool) -> list[Any]:
    """The gradients after each of seven steps; they are added up over three."""
    torch.manual_seed(0)
    leaves, step = PROGRAMS[name]()
    found = []
    for number in range(7):
        for tensor in leaves if number % 3 == 0 else []:
            tensor.grad = None
        with retrograd.enable() if enabled else nullcontext():
            step(number)
        found.append([None if tensor.grad is None else tensor.grad.clone() for tensor in leaves])
    return found


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_no_value_of_an_earlier_step(name: str) -> None:
    torch.testing.assert_close(run(name, True), run(name, False), rtol=1e-4, atol=1e-5)
