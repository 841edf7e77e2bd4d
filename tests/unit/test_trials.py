# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whether a backward takes longer compiled, from times in noise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from retrograd.frontend.autograd.engine.trials import MOST, WARM_UP, Trial, Trials, describe_path, rank

Draw = Callable[[random.Random], float]


def quiet(source: random.Random) -> float:
    return source.gauss(1.0, 0.03)


def busy(source: random.Random) -> float:
    """Every third step waits for other programs, up to ten times as long as it takes."""
    return source.gauss(1.0, 0.05) + (source.uniform(0, 10) if source.random() < 0.3 else 0)


def judge(ratio: float, draw: Draw, seed: int) -> Trial:
    source, trial = random.Random(seed), Trial()
    while trial.is_slow is None:
        trial.add_compiled(ratio * draw(source))
        trial.add_eager(draw(source))
    return trial


@pytest.mark.parametrize(
    ("ratio", "draw", "least", "most"),
    [
        (0.8, quiet, 0, 0),
        (1.0, quiet, 0, 0),
        (1.2, quiet, 30, 30),
        (0.8, busy, 0, 0),
        (1.0, busy, 0, 1),
        (1.05, busy, 0, 1),
        (1.4, busy, 24, 30),
    ],
)
def test_verdicts_of_thirty_trials(ratio: float, draw: Draw, least: int, most: int) -> None:
    assert least <= sum(bool(judge(ratio, draw, seed).is_slow) for seed in range(30)) <= most


def test_steps_at_first_are_not_counted_and_what_is_judged_is_not_timed() -> None:
    trial = Trial()
    for _ in range(WARM_UP):
        trial.add_compiled(5.0)
        assert not trial.is_waiting
    for _ in range(2 * MOST):
        trial.add_compiled(0.5)
        trial.add_eager(1.0)
    assert trial.is_slow is False and max(trial.compiled) == 0.5 and len(trial.eager) < 10
    trial.add_compiled(0.5)
    assert not trial.is_waiting


def test_ranks() -> None:
    assert rank([1.0, 2.0], [1.5, 1.5]) == 0
    assert rank([3.0] * 8, [1.0] * 8) == -rank([0.0] * 8, [1.0] * 8) > 3


def test_backwards_are_told_apart_by_what_is_behind_their_roots() -> None:
    def loss(layer: torch.nn.Linear, rows: int) -> torch.Tensor:
        result: torch.Tensor = layer(torch.ones(rows, 3)).tanh().sum()
        return result

    one, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    assert describe_path([loss(one, 2)]) == describe_path([loss(one, 2)])
    assert len({describe_path([loss(layer, rows)]) for layer in (one, other) for rows in (2, 3)}) == 4


def test_what_is_alike_is_left_once_all_of_it_is_slow() -> None:
    """As the backwards of an accumulation are, with gradients that are there and without."""
    trials, both, loss = Trials(), (Trial(), Trial()), torch.ones(3, requires_grad=True).sum()
    reasons = []
    for _ in range(WARM_UP + MOST):
        for trial, seconds in zip(both, (2.0, 3.0), strict=True):
            trials.add_compiled("kind", [loss], trial, seconds)
            if trials.takes_turn("kind"):
                reasons.append(trials.add_eager([loss], trial, 1.0))
        assert trials.is_left([loss]) == all(trial.is_slow for trial in both)
    assert trials.is_left([loss]) and not trials.is_left([torch.ones(3, requires_grad=True).sum()])
    # What has no backward is for PyTorch's engine to refuse.
    assert not trials.is_left([]) and not trials.is_left([torch.ones(3).sum()])
    assert [reason for reason in reasons if reason is not None] == [
        "compiled, it takes 3000000 us, and there 1000000 (medians of 17 each, in turn); "
        "enable(only_if_faster=False) runs it compiled"
    ]
