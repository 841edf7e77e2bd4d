# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a model takes from Python: values that are others at a later call, random numbers, clocks, the environment."""

from __future__ import annotations

import contextlib
import copy
import datetime
import gc
import itertools
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from random import random as coin
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd
from retrograd.frontend.doors import capture
from retrograd.frontend.doors.capture import capture_joint
from retrograd.frontend.python.python_calls_seen import PythonSeen, run_watched

GAIN = 1.0


class Config:
    def __init__(self) -> None:
        self.alpha, self.name = 2, "relu"
        self.scales: dict[str, Any] = {"first": 1.0, "rest": [1, 2]}
        self.unread = 5


SETTINGS = Config()


class Model(nn.Module):
    iterator: Any
    waiting: Any
    held: Any
    kind = "plain"

    def __init__(self, extra: Callable[[Any], float] = lambda self: 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.0)
        self.config, self.temperature, self.extra = Config(), 1.5, extra
        self.generator, self.own = np.random.default_rng(0), random.Random(0)
        self.calls, self.unnamed = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.linear(x)) / self.temperature * self.config.alpha * SETTINGS.alpha * GAIN
        x = x * self.config.scales["first"] + self.config.scales["rest"][1]
        if self.config.name == "relu":
            x = x.relu()
        if self.kind == "square":
            x = x.square()
        return x.sum() * self.extra(self)


def _check(step: Any, model: nn.Module, x: Tensor) -> None:
    found, expected = step(x), model(x)
    torch.testing.assert_close(found, expected)
    wanted = [p for p in (*model.parameters(), x) if p.requires_grad]
    torch.testing.assert_close(torch.autograd.grad(found, wanted), torch.autograd.grad(expected, wanted))


def _changes() -> dict[str, Callable[[Model, pytest.MonkeyPatch], None]]:
    return {
        "attribute": lambda model, patch: setattr(model, "temperature", 0.5),
        "type": lambda model, patch: setattr(model, "temperature", True),
        "configuration": lambda model, patch: setattr(model.config, "alpha", 7),
        "text": lambda model, patch: setattr(model.config, "name", "none"),
        "in a list": lambda model, patch: model.config.scales["rest"].__setitem__(1, 9),
        "layer": lambda model, patch: setattr(model.dropout, "p", 1.0),
        "of the class": lambda model, patch: patch.setattr(Model, "kind", "square"),
        "in place of the class's": lambda model, patch: setattr(model, "kind", "square"),
        "global": lambda model, patch: patch.setitem(globals(), "GAIN", 3.0),
        "global object": lambda model, patch: patch.setattr(SETTINGS, "alpha", 3),
    }


@pytest.mark.short_cases("layer", "global", "in a list", "type")
@pytest.mark.parametrize("change", list(_changes()))
def test_other_value_is_compiled_anew(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Model(), torch.randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    _check(step, model, x)
    _changes()[change](model, monkeypatch)
    _check(step, model, x)
    assert len(step.explain().to_dict()["specializations"]) == 1
    _check(step, model, x)
    assert len(step.explain().to_dict()["specializations"]) == 1


def test_value_that_comes_back_is_not_compiled_again() -> None:
    model, x = Model(), torch.randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    for temperature in (2.0, 1.5, 2.0, 1.5):
        model.temperature = temperature
        _check(step, model, x)
    model.unnamed, model.config.unread = 1, 2
    _check(step, model, x)
    assert step.explain().to_dict()["specializations"] == ["model.temperature (1.5, now 2.0)"]


temperature = 0


def test_global_with_the_name_of_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop's counter, say, is no value of the model's that has one of its own."""
    model, x = Model(), torch.randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    monkeypatch.setitem(globals(), "temperature", 1)
    _check(step, model, x)
    assert "specializations" not in step.explain().to_dict()


def test_closure_and_function() -> None:
    scale = 2.0

    def function(x: Tensor) -> Tensor:
        return (x * scale).sum()

    x = torch.randn(3, requires_grad=True)
    step = retrograd.compile_backward(function, (x,))
    assert float(step(x)) == float(function(x))
    scale = 3.0
    torch.testing.assert_close(step(x), function(x))
    torch.testing.assert_close(torch.autograd.grad(step(x), x), torch.autograd.grad(function(x), x))


def test_value_that_never_rests_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrograd.specializations.LIMIT", 3)
    model, x = Model(), torch.randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    with pytest.warns(
        retrograd.SpecializationWarning, match=r"model\.temperature .* run in eager: pass it as a tensor"
    ):
        for number in range(5):
            model.temperature = 10.0 + number
            _check(step, model, x)
    assert len(step.explain().to_dict()["specializations"]) == 3


def test_critic_that_is_frozen_at_times() -> None:
    """A GAN's critic is trained in turn with what its gradients train."""
    model, x = Model(), torch.randn(2, 3, requires_grad=True)
    model.requires_grad_(False)
    step = retrograd.compile_backward(model, (x,))
    for trained in (False, True, False, True):
        model.requires_grad_(trained)
        _check(step, model, x)
    assert step.explain().to_dict()["specializations"] == ["more tensors that require grad"]


def by_random(model: Any) -> float:
    start = 0.5
    return start + random.random()  # drawn here


def by_coin(model: Any) -> float:
    return 1.0 if coin() < 0.5 else 2.0  # drawn here


def by_uniform(model: Any) -> float:
    value = random.uniform(0.0, 1.0)  # drawn here
    return value * 2


def by_numpy(model: Any) -> float:
    return float(np.random.rand())  # drawn here


def by_own_generator(model: Any) -> float:
    return float(model.generator.normal())  # drawn here


def by_own_random(model: Any) -> float:
    return float(model.own.random())  # drawn here


def by_clock(model: Any) -> float:
    return time.time() % 2  # drawn here


def by_date(model: Any) -> float:
    return datetime.datetime.now().microsecond  # drawn here


def by_bytes(model: Any) -> float:
    return os.urandom(1)[0]  # drawn here


def by_identifier(model: Any) -> float:
    return uuid.uuid4().int % 2  # drawn here


@pytest.mark.parametrize(
    "draw",
    [
        *(by_random, by_coin, by_uniform, by_numpy, by_own_generator, by_own_random),
        *(by_clock, by_date, by_bytes, by_identifier),
    ],
)
def test_randomness_of_pythons(draw: Callable[[Any], float]) -> None:
    """Frozen at the trace, they would be one number for ever."""
    model, x = Model(draw), torch.randn(2, 3)
    states = random.getstate(), np.random.get_state()[1].copy(), model.own.getstate()  # type: ignore[index]
    refused = pytest.raises(retrograd.CaptureError, match="compiled in as they were while tracing")
    with refused as caught, contextlib.ExitStack() as stack:
        capture_joint(stack, model, (x,))
    assert "# drawn here" in str(caught.value)
    assert f"in {draw.__name__}" in str(caught.value)
    assert random.getstate() == states[0] and model.own.getstate() == states[2]
    assert np.array_equal(np.random.get_state()[1], states[1])  # type: ignore[index]


def by_seed(model: Any) -> float:
    torch.manual_seed(1)  # seeded here
    return 1.0


def by_generator(model: Any) -> float:
    torch.default_generator.manual_seed(1)  # seeded here
    return 1.0


def by_state(model: Any) -> float:
    torch.set_rng_state(model.state)  # seeded here
    return 1.0


def by_fork(model: Any) -> float:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # seeded here
    return 1.0


def _seeded(x: Tensor) -> Tensor:
    torch.manual_seed(1)  # seeded here
    return x.sin()


def by_part(model: Any) -> float:
    checkpoint(_seeded, torch.ones(2), use_reentrant=False)
    return 1.0


def by_asking(model: Any) -> float:
    return float(torch.initial_seed() % 2)  # seeded here


@pytest.mark.parametrize("seed", [by_seed, by_generator, by_state, by_fork, by_part, by_asking])
def test_seeds_of_pytorchs(seed: Callable[[Any], float]) -> None:
    """In eager the numbers behind them are the same at each call; compiled code would draw others each time."""
    model, x = Model(seed), torch.randn(2, 3)
    state = model.state = torch.get_rng_state()
    refused = pytest.raises(retrograd.CaptureError, match="the state of PyTorch's random numbers")
    with refused as caught, contextlib.ExitStack() as stack:
        capture_joint(stack, model, (x,))
    assert "# seeded here" in str(caught.value)
    assert torch.equal(torch.get_rng_state(), state)


class Recomputed(torch.autograd.Function):
    """Drops out elements, and once more in the backward, from a seed of its own, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        torch.manual_seed(5)
        return torch.dropout(2 * x, 0.5, True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.manual_seed(5)
            (given,) = torch.autograd.grad(torch.dropout(2 * x, 0.5, True), x, gradient)
        return given


def test_the_remedy_of_seeds_works() -> None:
    x = torch.ones(40, requires_grad=True)
    with pytest.raises(retrograd.CaptureError, match="the state of PyTorch's random numbers") as refused:
        retrograd.compile_backward(Recomputed.apply, (x,), cache=False)
    assert "retrograd.enable()" in refused.value.remedy
    for _ in range(3):
        with retrograd.enable(cache=False):
            result = Recomputed.apply(x)  # type: ignore[no-untyped-call]
            (gradient,) = torch.autograd.grad(result.sum(), x)
        assert torch.equal(gradient != 0, result != 0)


def test_seeds_of_other_generators() -> None:
    """A generator of the model's own, and what a checkpoint does with the state of PyTorch's, are none of these."""
    generator = torch.Generator()

    def part(x: Tensor) -> Tensor:
        generator.manual_seed(1)
        return x.sin()

    def by_own(model: Any) -> float:
        checkpoint(part, torch.ones(2), use_reentrant=False)
        return 1.0

    with contextlib.ExitStack() as stack:
        capture_joint(stack, Model(by_own), (torch.randn(2, 3),))


def test_clock_that_is_not_the_models() -> None:
    """Who collects garbage, or imports a module for the first time, may ask a clock in the middle of a forward."""
    started: list[float] = []

    def once(model: Any) -> float:
        if not started:
            started.append(time.time())
        gc.collect()
        return 1.0

    def callback(phase: str, info: dict[str, int]) -> None:
        started.append(time.perf_counter())

    gc.callbacks.append(callback)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        model, x = Model(), torch.randn(2, 3)
        with contextlib.ExitStack() as stack:
            capture_joint(stack, model, (x,))
    finally:
        gc.callbacks.remove(callback)
        gc.set_threshold(*threshold)
    assert started
    started.clear()
    with contextlib.ExitStack() as stack:
        capture_joint(stack, Model(once), (x,))


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(model: Any) -> float:
        return float(os.environ.get("RETROGRAD_TEST_SCALE", "1")) + len(os.getenv("RETROGRAD_TEST_TEXT", ""))

    model, x = Model(read), torch.randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    _check(step, model, x)
    monkeypatch.setenv("RETROGRAD_TEST_SCALE", "3")
    _check(step, model, x)
    monkeypatch.setenv("RETROGRAD_TEST_TEXT", "abc")
    _check(step, model, x)
    assert len(step.explain().to_dict()["specializations"]) == 2


def read(path: Path) -> str:
    with open(path) as file:
        return file.read()


def test_read_files(tmp_path: Path) -> None:
    """A file may have something else in it by the next call."""
    (tmp_path / "scale").write_text("2")
    model, x = Model(lambda model: float(read(tmp_path / "scale"))), torch.randn(2, 3)
    with pytest.raises(
        retrograd.CaptureError, match=r"calls io\.open, which would be compiled in(?s:.*)read it before"
    ):
        retrograd.compile_backward(model, (x,))


@pytest.mark.parametrize(
    "held",
    [lambda rng: SimpleNamespace(rng=rng), lambda rng: {"rng": [rng]}, lambda rng: lambda: rng],
    ids=["object", "dict", "closure"],
)
@pytest.mark.parametrize("kind", [np.random.default_rng, random.Random])
def test_generators_that_are_held(held: Callable[[Any], Any], kind: Callable[[int], Any]) -> None:
    """They are refused, and are what they were: a trace that draws from them leaves nothing."""
    model, x = Model(lambda model: by_held(model.held)), torch.randn(2, 3)
    model.held = held(kind(0))
    with pytest.raises(retrograd.CaptureError, match=r"compiled in as they were while tracing.*in by_held") as refused:
        retrograd.compile_backward(model, (x,))
    assert by_held(model.held) == kind(0).random()
    # Under torch.compile what an object of Python's draws would be the same at each call.
    assert ("torch.compile" in str(refused.value)) == (kind is not random.Random)


def by_held(held: Any) -> float:
    rng = held["rng"][0] if isinstance(held, dict) else held() if callable(held) else held.rng
    return float(rng.random())


def test_what_other_threads_ask_for_is_none_of_the_models() -> None:
    """A model is known by what it goes by: another thread's names would make it another."""
    seen = PythonSeen()

    def ask(name: str) -> None:
        getattr(seen, name, None)
        os.environ.get(name)

    def run() -> None:
        other = threading.Thread(target=ask, args=("of_another",))
        other.start()
        other.join()
        ask("of_the_model")

    run_watched(run, seen, {})
    assert "of_the_model" in seen.read and "of_another" not in seen.read
    assert [*seen.environment] == ["of_the_model"]


HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF["itself"] = [HOLDS_ITSELF]


def test_a_global_that_holds_itself() -> None:
    model, x = Model(lambda _: 2.0 if HOLDS_ITSELF else 1.0), torch.randn(2, 3)
    assert torch.equal(retrograd.compile_backward(model, (x,))(x), model(x))


def test_the_callers_profiler_goes_on() -> None:
    """Also where hooks on autograd's graph are looked for."""

    def hooked(x: Tensor) -> Tensor:
        hidden = x.sin()
        hidden.register_hook(lambda gradient: gradient * 2)
        return hidden

    x = torch.randn(2, 3, requires_grad=True)
    sys.setprofile(note := lambda *_: None)
    try:
        retrograd.compile_backward(hooked, (x,))
        assert sys.getprofile() is note
    finally:
        sys.setprofile(None)


class Scales:
    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, gradient: Tensor) -> Tensor:
        return scaled(gradient, self.model)


def scaled(gradient: Tensor, model: Model) -> Tensor:
    return gradient * model.config.alpha


def test_what_a_hook_goes_by_in_the_backward() -> None:
    """Its code has not run when the forward has."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = Model()
            self.__dict__["hook"] = Scales(self.inner)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.inner.linear(x)
            h.register_hook(self.__dict__["hook"])
            return h.square().sum()

    model, x = Hooked(), torch.randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    for alpha in (model.inner.config.alpha, 5):
        model.inner.config.alpha = alpha
        _check(step, model, x)


STEPS = {"n": 0}


def by_dict(model: Any) -> float:
    STEPS["n"] += 1
    return STEPS["n"]


def by_function(model: Any) -> float:
    by_function.n += 1  # type: ignore[attr-defined]
    return float(by_function.n)  # type: ignore[attr-defined]


by_function.n = 0  # type: ignore[attr-defined]


def by_iterator(model: Any) -> float:
    return float(next(model.iterator))


def by_list(model: Any) -> float:
    return float(model.waiting.pop())


@pytest.mark.parametrize("count", [by_dict, by_function, by_iterator, by_list])
def test_model_that_goes_by_what_it_counts(count: Callable[[Any], float]) -> None:
    model, x = Model(count), torch.randn(2, 3)
    model.iterator, model.waiting = itertools.count(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    with pytest.raises(retrograd.CaptureError, match="computes otherwise each time that it is called"):
        retrograd.compile_backward(model, (x,))


def test_counter_that_does_not_matter() -> None:
    def count(model: Any) -> float:
        by_dict(model)
        model.waiting.append(1.0)
        return 1.0

    model, x = Model(count), torch.randn(2, 3)
    model.waiting = []
    step = retrograd.compile_backward(model, (x,))
    _check(step, model, x)
    _check(step, model, x)
    assert "specializations" not in step.explain().to_dict()


def by_gradient(model: Any) -> float:
    return 2.0 if model.linear.weight.grad is None else 3.0


def by_version(model: Any) -> float:
    return 2.0 if model.linear.weight._version == 0 else 3.0


@pytest.mark.parametrize("ask", [by_gradient, by_version])
def test_what_a_trace_does_not_have(ask: Callable[[Any], float]) -> None:
    with pytest.raises(retrograd.CaptureError, match=f"which a trace does not have, at .*in {ask.__name__}"):
        retrograd.compile_backward(Model(ask), (torch.randn(2, 3),))


class Averaging(nn.Module):
    """Asks what requires no grad for its gradient, as layers do that average their codes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(3, 3), nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        is_first = self.mean.grad is None and x.grad is None
        result: Tensor = (self.linear(x) - self.mean) * (2.0 if is_first else 3.0)
        return result


def test_what_requires_no_grad_has_none() -> None:
    model, x = Averaging(), torch.randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    reference = copy.deepcopy(model)
    torch.testing.assert_close(step(x), reference(x))
    torch.testing.assert_close(model.mean, reference.mean)
    model.mean.grad = torch.ones(3)
    with pytest.raises(retrograd.CaptureError, match=r"the gradient in \.grad"):
        step(x)


def test_what_is_asked_of_parameters() -> None:
    """Whether one is trained, and how it lies in memory."""
    model = Model(lambda model: 2.0 if model.linear.weight.requires_grad else 3.0)
    x = torch.randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    _check(step, model, x)
    model.linear.weight.requires_grad_(False)
    _check(step, model, x)
    model = Model(lambda model: 2.0 if model.linear.weight.is_contiguous() else 3.0)
    step = retrograd.compile_backward(model, (x,))
    model.linear.weight = nn.Parameter(model.linear.weight.detach().t())
    _check(step, model, x)


def test_what_is_asked_of_arguments() -> None:
    class Asking(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2.0 if x.is_contiguous() else 3.0) * (2.0 if x.requires_grad else 3.0)

    model = Asking()
    step = retrograd.compile_backward(model, (torch.randn(2, 3),))
    for x in (torch.randn(2, 3), torch.randn(3, 2).t(), torch.randn(2, 3, requires_grad=True)):
        _check(step, model, x)


def test_gradients_that_are_off() -> None:
    """A trace has them on: a model that asks runs in eager where they are off."""
    model, x = Model(lambda model: 2.0 if torch.is_grad_enabled() else 3.0), torch.randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    _check(step, model, x)
    with torch.no_grad():
        torch.testing.assert_close(step(x), model(x))
    _check(step, model, x)
    assert "specializations" not in step.explain().to_dict()


def own_step(self: Any, x: Tensor) -> Tensor:
    return x * 3


def test_method_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Model(), torch.randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    _check(step, model, x)
    monkeypatch.setattr(nn.Dropout, "forward", own_step)
    _check(step, model, x)
    (text,) = step.explain().to_dict()["specializations"]
    assert text.startswith("torch.nn.modules.dropout.Dropout.forward")


def test_parametrization_that_is_added() -> None:
    model, x = Model(), torch.randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    _check(step, model, x)
    nn.utils.parametrizations.weight_norm(model.linear)
    _check(step, model, x)


class Counting(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (self.calls if self.unnamed else 1)


def count_reads(model: Any) -> float:
    model.config.unread += 1
    return 1.0


@pytest.mark.parametrize(("extra", "traces"), [(lambda model: 1.0, 1), (count_reads, 2)], ids=["none", "written"])
def test_traced_again_where_it_writes(
    extra: Callable[[Any], float], traces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tracer itself puts in the place of PyTorch's functions is nothing that the model writes to."""
    traced: list[torch.nn.Module] = []

    def trace(stack: contextlib.ExitStack, flat: torch.nn.Module, tensors: tuple[Tensor, ...]) -> Any:
        traced.append(flat)
        return untouched(stack, flat, tensors)

    untouched = capture.__dict__["_trace"]
    monkeypatch.setattr(capture, "_trace", trace)
    with contextlib.ExitStack() as stack:
        capture_joint(stack, Model(extra), (torch.randn(2, 3),))
    assert len(traced) == traces


def test_model_that_counts_its_calls() -> None:
    """To count is no harm; to compute with it would be."""
    model, x = Counting(), torch.randn(2, 3)
    step = retrograd.compile_backward(model, (x,))
    _check(step, model, x)
    _check(step, model, x)
    assert step.explain().to_dict().get("specializations") is None
    model.unnamed = 1
    with pytest.raises(retrograd.CaptureError, match=r"computes otherwise each time that it is called.*calls"):
        retrograd.compile_backward(model, (x,))
