# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Models that mask what numpy draws at each step, as SpecAugment does: gradients are eager's for the same numbers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executables import compile_once
from torch import Tensor, nn

import retrograd
from retrograd.frontend.python.drawn_arrays import DrawnError
from retrograd.pipelines.stages import staged


@pytest.fixture(autouse=True)
def _compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one model in several tests, and as it is without the share that draws, iree-compile is asked once."""
    monkeypatch.setattr(staged, "compile_executable", compile_once)


def draw_mask(shape: tuple[int, int], share: float, least: int = 0) -> Any:
    mask = np.zeros(shape, dtype=bool)
    for row in mask:
        count = max(int(share * shape[1] + np.random.rand(1).item()), least)
        row[np.random.choice(shape[1], count, replace=False)] = True
    return mask


def draw_weights(count: int) -> Any:
    return np.random.rand(count).astype(np.float32)


def draw_coin(share: float) -> bool:
    return bool(np.random.rand() < share)


def draw_for(x: Tensor) -> Any:
    return np.random.rand(len(x)) < 0.5


class Masked(nn.Module):
    """Puts a parameter where a mask is, and weighs rows, as it was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.masked = nn.Parameter(torch.rand(8))
        self.share = 0.3

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training and self.share > 0:
            mask = draw_mask((x.shape[0], x.shape[1]), self.share, least=2)
            x = x.clone()
            x[torch.tensor(mask, device=x.device, dtype=torch.bool)] = self.masked.to(x.dtype)
            x = x * torch.tensor(draw_weights(x.shape[0]))[:, None, None]
        result: Tensor = self.last(x).sin()
        return result


def step(model: Masked, call: Callable[..., Any], x: Tensor, seed: int) -> tuple[list[Tensor], Any]:
    np.random.seed(seed)
    model.zero_grad()
    output = call(x)
    output.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    state: Any = np.random.get_state()
    return [output.detach().clone(), *gradients], state[2]


def compare(model: Masked, compiled: Callable[..., Any], x: Tensor, seed: int) -> None:
    (found, position), (eager, eagers_position) = (step(model, call, x, seed) for call in (compiled, model))
    for ours, theirs in zip(found, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert position == eagers_position


def test_each_step_draws_what_eager_draws() -> None:
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(4, 10, 8)
    np.random.seed(7)
    compiled = retrograd.compile_backward(model, (x,), cache=False)
    drawn = np.random.rand()
    np.random.seed(7)
    assert drawn == np.random.rand(), "compiling draws from the user's numbers"
    for seed in range(3):
        compare(model, compiled, x, seed)
    assert compiled.explain().to_dict()["verification"] == [
        "@forward: verified by its first call",
        "@backward: verified by its first call",
    ]
    model.share = 0.6
    compare(model, compiled, x, 3)
    model.share = 0.3
    compare(model, compiled, x, 4)
    assert "every value agrees" in str(compiled.bisect(x))


def test_a_file_takes_what_was_drawn(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(4, 10, 8)
    compiled = retrograd.compile_backward(model, (x,), cache=False)
    compiled.save(tmp_path / "masked.rgb")
    loaded = retrograd.load(tmp_path / "masked.rgb", model)
    np.random.seed(0)
    drawn = (torch.tensor(draw_mask((4, 10), 0.3, least=2)), torch.tensor(draw_weights(4)))
    np.random.seed(0)
    torch.testing.assert_close(loaded(x, retrograd_drawn=drawn), compiled(x))


SCALE = 2.0
ROWS = np.zeros(4, dtype=np.float32)


def draw_rows(scale: float) -> Any:
    ROWS[:] = np.random.rand(4) * scale
    return ROWS


def scaled(x: Tensor) -> Tensor:
    rows = torch.tensor(draw_rows(1.0)), torch.as_tensor(draw_rows(2.0))
    return x * SCALE * rows[0][:, None] + rows[1][:, None]


def test_a_function_goes_by_its_globals_and_draws_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(4, 8, requires_grad=True)
    compiled = retrograd.compile_backward(scaled, (x,), cache=False)
    for scale in (2.0, 3.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        runs = []
        for call in (compiled, scaled):
            np.random.seed(1)
            # Two forwards before a backward: what the first drew is its own.
            first, second = call(x), call(x)
            state: Any = np.random.get_state()
            runs.append((first.detach(), second.detach(), *torch.autograd.grad(first.sin().sum(), x), state[2]))
        for ours, theirs in zip(*runs, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_what_another_program_takes_is_drawn_once() -> None:
    model, x = Masked(), torch.randn(4, 10, 8)
    compiled = retrograd.compile_backward(model, (x,), cache=False)
    for requires_grad in (True, False, True):
        y = torch.randn(4, 10, 8, requires_grad=requires_grad)
        compare(model, compiled, y, 3)
    state: Any = np.random.get_state()
    with pytest.raises(retrograd.ArgumentError):
        compiled(x[:, :9])
    now: Any = np.random.get_state()
    assert state[2] == now[2]


def test_other_threads_call_the_function_itself() -> None:
    model, x, found = Masked(), torch.randn(4, 10, 8), set()
    done = threading.Event()

    def draw() -> None:
        while not done.is_set():
            # None of the numbers that the model draws.
            found.add(type(draw_weights(0)))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        retrograd.compile_backward(model, (x,), cache=False)
    finally:
        done.set()
        thread.join()
    assert found == {np.ndarray}


def draw_some(share: float) -> Any:
    return np.flatnonzero(np.random.rand(8) < share)


def takes_some(x: Tensor) -> Tensor:
    return x[:, torch.tensor(draw_some(0.5))].sin()


def test_arrays_of_another_shape_are_compiled_for() -> None:
    x = torch.rand(4, 8, requires_grad=True)
    compiled = retrograd.compile_backward(takes_some, (x,), cache=False)
    for seed in (0, 1):
        np.random.seed(seed)
        found = compiled(x)
        np.random.seed(seed)
        torch.testing.assert_close(found, takes_some(x))


def spreads(x: Tensor) -> Tensor:
    weights = draw_weights(8)
    return x * torch.tensor(weights / weights.std())


def repeats(x: Tensor) -> Tensor:
    return x * torch.tensor(draw_weights(4).repeat(2))


def looks(x: Tensor) -> Tensor:
    weights = draw_weights(8)
    return x * torch.tensor(weights) if weights[0] > 0.5 else x


def asks_numpy(x: Tensor) -> Tensor:
    return x * torch.tensor(np.sort(draw_weights(8)))


def flips(x: Tensor) -> Tensor:
    return x.sin() if draw_coin(0.5) else x.cos()


def draws_by_itself(x: Tensor) -> Tensor:
    return x * torch.tensor(draw_mask((4, 8), 0.5)) * random.random()


def draws_for_a_tensor(x: Tensor) -> Tensor:
    return x * torch.tensor(draw_for(x))[:, None]


@pytest.mark.parametrize("function", [flips, spreads, repeats, looks, asks_numpy, draws_by_itself, draws_for_a_tensor])
def test_numbers_that_decide_what_is_computed_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(DrawnError, match="draws random numbers from Python's"):
        retrograd.compile_backward(function, (torch.rand(4, 8, requires_grad=True),), cache=False)


def test_of_a_function_whose_arguments_differ_the_first_is_not_taken_for_the_others() -> None:
    """A count of calls that the model keeps is no value that it was compiled for."""
    counts = [0]

    def function(x: Tensor) -> Tensor:
        counts[0] += 1
        return x * torch.tensor(draw_mask((4, 8), 0.5 / counts[0]))

    with pytest.raises(retrograd.CaptureError):
        retrograd.compile_backward(function, (torch.rand(4, 8, requires_grad=True),), cache=False)


class Dropping(nn.Module):
    """Leaves layers out by coins, with a probability of ``layerdrop``, in the ways in which libraries write it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layerdrop = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or random.random() >= self.layerdrop:
            x = self.first(x)
        probability = np.random.uniform(0, 1)
        if probability < self.layerdrop or random.uniform(1, 2) < self.layerdrop:
            return x
        result: Tensor = self.last(x).sin() * torch.tensor(draw_weights(4))[:, None]
        return result


def test_coins_that_decide_nothing_are_drawn_and_others_refused() -> None:
    torch.manual_seed(0)
    model, x = Dropping(), torch.randn(4, 8)
    compiled = retrograd.compile_backward(model, (x,), cache=False)
    for seed in (0, 1):
        results = []
        for call in (compiled, model):
            np.random.seed(seed)
            random.seed(seed)
            model.zero_grad()
            call(x).square().sum().backward()
            assert model.first.weight.grad is not None
            results.append((model.first.weight.grad.clone(), np.random.rand(), random.random()))
        torch.testing.assert_close(results[0], results[1])
    model.layerdrop = 0.5
    with pytest.raises(DrawnError, match="Python's random"):
        compiled(x)


def test_a_coin_that_is_returned_is_refused() -> None:
    def draw(x: Tensor) -> tuple[Tensor, float]:
        drawn = random.random()
        return (x.sin() if drawn >= 0.0 else x), drawn

    with pytest.raises(DrawnError, match="Python's random"):
        retrograd.compile_backward(draw, (torch.randn(2, requires_grad=True),), cache=False)
