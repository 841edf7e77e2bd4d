# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Custom functions and hooks inside of ``retrograd.enable()`` that give None at one step and a gradient at the next."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch

import retrograd
from retrograd.frontend.autograd.steps import compilation

# Which of its two gradients a function gives, by its name.
Pattern = dict[str, tuple[bool, bool]]


class Gives(torch.autograd.Function):
    """A product that gives those of its two gradients that it is told to."""

    now: ClassVar[Pattern] = {}
    log: ClassVar[list[Any]] = []
    # Whose gradients are kept.
    kept: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, name: str) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.name = name
        return a * b

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        a, b = ctx.saved_tensors
        first, second = Gives.now[ctx.name]
        Gives.log.append(ctx.name)
        return (gradient * b if first else None), (gradient * a if second else None), None


class TakesNone(Gives):
    """The same, of two results; it is handed None for absent gradients."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, name: str) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b)
        ctx.name = name
        return a * b, a + b

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        a, b = ctx.saved_tensors
        Gives.log.append((ctx.name, [g is None for g in gradients]))
        first, second = Gives.now[ctx.name]
        if gradients[0] is None:
            return (gradients[1] if first else None), None, None
        return (gradients[0] * b if first else None), (gradients[0] * a if second else None), None


class WritesToView(torch.autograd.Function):
    """Doubles in place, and gives a gradient or none."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(a)
        return a.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Gives.log.append(("view", gradients[0].tolist()))
        return gradients[0] * 2 if Gives.now["view"][0] else None


gives: Callable[..., torch.Tensor] = Gives.apply
takes_none: Any = TakesNone.apply
writes_to_view: Any = WritesToView.apply
Program = Callable[[Any], Any]


def is_none(name: str) -> Callable[..., None]:
    def hook(*gradients: Any) -> None:
        Gives.log.append((name, torch.utils._pytree.tree_map(lambda g: g is None, gradients)))

    return hook


def had_gradient(name: str) -> Callable[[torch.Tensor], None]:
    return lambda parameter: Gives.log.append((name, parameter.grad is None))


def with_hooks(leaves: list[torch.Tensor]) -> torch.Tensor:
    w, v, u = leaves
    u.register_post_accumulate_grad_hook(had_gradient("u"))
    x, y = w.sin() * 2, v * u
    y.register_hook(is_none("y"))
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(is_none("pre"))
    y.grad_fn.register_hook(is_none("post"))
    z = gives(x, y, "a")
    return (z + x).exp().sum()


def one_behind_the_other(leaves: list[torch.Tensor]) -> torch.Tensor:
    w, v, u = leaves
    first = gives(w * 2, v.cos(), "a")
    second = gives(first.sin(), (u * 3) * first, "b")
    return (second * w).square().mean()


def with_none_for_none(leaves: list[torch.Tensor]) -> torch.Tensor:
    w, v, u = leaves
    one, two = takes_none(w.exp(), v * u, "a")
    three = gives(one, two * 1.5, "b")
    return (three + w).sum()


def in_a_view(leaves: list[torch.Tensor]) -> torch.Tensor:
    w, v, u = leaves
    base = w * v
    writes_to_view(base[1:3])
    return (base * u + w).sum()


def in_views_one_behind_the_other(leaves: list[torch.Tensor]) -> torch.Tensor:
    """What wrote to the first view is not called where there is no gradient behind the second."""
    w, v, u = leaves
    first = w * v
    writes_to_view(first[1:3])
    second = first * u
    writes_to_view(second[1:3])
    return (second.sin() + v).sum()


def through_hooks(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Hooks on nodes leave out what a pattern says."""
    w, v, u = leaves
    x = w.sin()
    y = x * (v * u)
    assert y.grad_fn is not None
    y.grad_fn.register_hook(
        lambda given, _: tuple(g if keeps else None for g, keeps in zip(given, Gives.now["a"], strict=True))
    )
    z = (y + x).exp()
    assert z.grad_fn is not None
    z.grad_fn.register_prehook(lambda given: given if Gives.now["b"][0] else (None,))
    z.grad_fn.register_hook(is_none("post"))
    return z.sum() + (w * u).square().sum()


def with_kept_gradients(leaves: list[torch.Tensor]) -> torch.Tensor:
    w, v, u = leaves
    x, y = w.sin(), v * u
    x.retain_grad()
    y.retain_grad()
    Gives.kept += [x, y]
    return gives(x, y, "a").exp().sum()


PROGRAMS = [
    with_hooks,
    one_behind_the_other,
    with_none_for_none,
    in_a_view,
    in_views_one_behind_the_other,
    through_hooks,
    with_kept_gradients,
]


def run(
    program: Program, patterns: list[Pattern], enabled: bool, accumulates: bool = True, **options: Any
) -> list[Any]:
    """Returns what each step leaves and logs; some add to a gradient that is there."""
    torch.manual_seed(0)
    leaves: list[Any] = [torch.randn(5, requires_grad=True) for _ in range(3)]
    left = []
    for number, pattern in enumerate(patterns):
        Gives.now, Gives.log, Gives.kept = pattern, [], []
        own = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        if accumulates and number % 3 == 2:
            own[0].grad = torch.ones(5)
        if enabled:
            with retrograd.enable(**options):
                program(own).backward()
        else:
            program(own).backward()
        left.append(([None if t.grad is None else t.grad.clone() for t in (*own, *Gives.kept)], Gives.log))
    return left


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for (mine, my_log), (theirs, their_log) in zip(found, expected, strict=True):
        assert my_log == their_log
        for one, other in zip(mine, theirs, strict=True):
            assert (one is None) == (other is None), (one, other)
            if other is not None:
                torch.testing.assert_close(one, other)


def draw_patterns(seed: int, count: int) -> list[Pattern]:
    """Patterns in runs, as a training has them, so that what is compiled is used."""
    source = random.Random(seed)
    patterns: list[Pattern] = []
    while len(patterns) < count:
        pattern = {name: (source.random() < 0.6, source.random() < 0.6) for name in ("a", "b", "view")}
        patterns += [pattern] * source.choice([1, 2, 3])
    return patterns[:count]


# The second and the third draw of patterns are another walk through the same programs.
@pytest.mark.short_cases(*(f"{program.__name__}-0" for program in PROGRAMS), "one_behind_the_other-1")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("program", PROGRAMS)
def test_none_at_one_step_and_a_gradient_at_the_next(program: Program, seed: int) -> None:
    """Gradients, the order of Python, and who is given None, as in eager."""
    patterns = draw_patterns(seed, 14)
    assert_same(run(program, patterns, True), run(program, patterns, False))


@pytest.mark.parametrize("schedule", ["asap", "overlap", "fewest-stages"])
def test_none_and_gradients_in_turn_under_any_schedule(schedule: Any) -> None:
    patterns = draw_patterns(5, 10)
    found = run(one_behind_the_other, patterns, True, hook_schedule=schedule)
    assert_same(found, run(one_behind_the_other, patterns, False))


def test_a_step_that_gets_a_gradient_more_is_told_and_compiled_anew() -> None:
    first: Pattern = {"a": (True, False)}
    second: Pattern = {"a": (True, True)}
    before = len(retrograd.explain_recompiles())
    patterns = [first, first, second, second, second, first]

    def program(leaves: list[torch.Tensor]) -> torch.Tensor:
        return with_hooks(leaves).tanh()

    assert_same(run(program, patterns, True, False), run(program, patterns, False, False))
    entries = retrograd.explain_recompiles()[before:]
    assert [entry.outcome for entry in entries] == [
        "compiled",
        "ended in eager",
        "compiled",
        "runs compiled",
    ]
    assert entries[1].reasons == (
        "the backward of Gives, since it was compiled, gave a gradient at 1 where it gave None",
    )
    assert "None" in entries[3].reasons[0]


def test_writes_to_views_run_compiled() -> None:
    """What is on its way past the first was used for the last time before it."""
    patterns: list[Pattern] = [{"view": (True, True)}] * 3

    def program(leaves: list[torch.Tensor]) -> torch.Tensor:
        return in_views_one_behind_the_other(leaves).exp()

    before = len(retrograd.explain_recompiles())
    assert_same(run(program, patterns, True, False), run(program, patterns, False, False))
    assert [entry.outcome for entry in retrograd.explain_recompiles()[before:]] == ["compiled"]


def test_a_write_to_a_view_without_a_gradient_is_not_told() -> None:
    patterns: list[Pattern] = [{"view": (given, True)} for given in (False, False, True, True, False)]
    program = in_views_one_behind_the_other
    assert_same(run(program, patterns, True, False), run(program, patterns, False, False))


def test_a_step_that_ends_in_eager_knows_which_gradients_are_none() -> None:
    """Those that were None before the function with which it ends: what keeps its gradient keeps none."""

    class Other(Gives):
        """One of which no other test has shown that it gives either."""

    def gives(a: torch.Tensor, b: torch.Tensor, name: str) -> torch.Tensor:
        result: torch.Tensor = Other.apply(a, b, name)  # type: ignore[no-untyped-call]
        return result

    def program(leaves: list[torch.Tensor]) -> torch.Tensor:
        w, v, u = leaves
        x = w.sin()
        x.retain_grad()
        Gives.kept.append(x)
        y = gives(v.cos(), u * 2, "b")
        return (gives(x, y, "a").sin().cos() * 0.5).exp().sum()

    first: Pattern = {"a": (True, True), "b": (True, False)}
    second: Pattern = {"a": (False, True), "b": (True, True)}
    patterns = [first, first, second, first]
    before = len(retrograd.explain_recompiles())
    assert_same(run(program, patterns, True, False), run(program, patterns, False, False))
    assert "ended in eager" in [entry.outcome for entry in retrograd.explain_recompiles()[before:]]


def with_root(leaves: list[torch.Tensor]) -> torch.Tensor:
    """The derivative of a root is infinite at zero."""
    w, v, u = leaves
    return (gives(w.sqrt(), v, "a") * 1.5 + w * u).sum()


def run_with_root(program: Program, patterns: list[Pattern], starts: list[float], enabled: bool) -> list[Any]:
    """Returns the gradients of each step, or what was raised."""
    left: list[Any] = []
    for pattern, start in zip(patterns, starts, strict=True):
        Gives.now, Gives.log = pattern, []
        own: list[Any] = [torch.tensor([start, 1.0, 4.0]).requires_grad_() for _ in range(3)]
        try:
            with retrograd.enable() if enabled else nullcontext():
                program(own).backward()
            left.append([t.grad for t in own])
        except RuntimeError as error:
            left.append(str(error))
    return left


def test_nothing_is_computed_of_none_where_zeros_would_be_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 times infinity is no number. No step is waited for whose gradients are finite: there is none."""
    monkeypatch.setattr(compilation, "MOST_TOLD_NOTHING", 0)
    patterns: list[Pattern] = [{"a": (first, True)} for first in (True, True, False, False, True, False)]
    before = len(retrograd.explain_recompiles())
    found, expected = [run_with_root(with_root, patterns, [0.0] * 6, enabled) for enabled in (True, False)]
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert [e.outcome for e in retrograd.explain_recompiles()[before:]] == ["compiled", "ended in eager"]


def test_what_came_of_zeros_in_the_place_of_none_and_is_no_number_is_told() -> None:
    """Where no infinity was there when it was compiled; the next steps are as in eager."""
    patterns: list[Pattern] = [{"a": (first, True)} for first in (True, True, False, False, False, True, False)]
    starts = [2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]

    def program(leaves: list[torch.Tensor]) -> torch.Tensor:
        return with_root(leaves) * 1.5

    found, expected = [run_with_root(program, patterns, starts, enabled) for enabled in (True, False)]
    assert "times an infinity, are not a number" in found[3]
    torch.testing.assert_close(found[:3] + found[4:], expected[:3] + expected[4:], equal_nan=True)


def test_a_gradient_that_eager_does_not_look_at_is_let_go() -> None:
    """Of an input that needs none."""
    x = torch.randn(4, requires_grad=True)
    fixed = torch.randn(4)
    with retrograd.enable():
        for second in (False, False, True, True):
            x.grad, Gives.now = None, {"a": (True, second)}
            gives(x.sin(), fixed, "a").sum().backward()
            torch.testing.assert_close(x.grad, x.detach().cos() * fixed)


class Looks(torch.autograd.Function):
    """Looks which tensors are alive when its backward runs."""

    watched: ClassVar[list[weakref.ref[torch.Tensor]]] = []
    found: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return a * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Looks.found = [tensor() is not None for tensor in Looks.watched]
        return gradients[0] * 2


@pytest.mark.parametrize("second", [True, False])
def test_what_a_function_takes_lives_no_longer_than_until_it_was_called(second: bool) -> None:
    """As in eager: what it saved, and what eager might need behind one that gives None."""
    looks: Any = Looks.apply
    w, v = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    for enabled in (True, False):
        for _ in range(4):
            w.grad = v.grad = None
            Gives.now, Looks.found = {"a": (True, second)}, []
            with retrograd.enable() if enabled else nullcontext():
                x = looks(w * 1.5).sin()
                inner = x.exp()
                Looks.watched = [weakref.ref(inner)]
                y = gives(inner, v * 2, "a") + inner
                del x, inner
                (y * y).sum().backward()
            assert not enabled or Looks.found
            del y
        assert Looks.found == [False]
