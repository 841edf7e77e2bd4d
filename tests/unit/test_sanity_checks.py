# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which questions about a tensor's contents are checks that raise, by the code around them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from retrograd.frontend.python.sanity_checks import CheckRecorder, SanityCheck


def plain(t: Tensor) -> int:
    if t.any():
        raise ValueError(f"{t} of {len(t)}")
    return 1


def negated(t: Tensor) -> int:
    if not (t == 0).all():
        raise ValueError
    return 1


def item(t: Tensor) -> int:
    if not (t == 0).all().item():
        raise ValueError
    return 1


def compound(t: Tensor) -> int:
    if t.max() > 3 or t.min() < -3:
        raise ValueError
    return 1


def guarded(t: Tensor | None) -> int:
    if t is not None and t.sum() > 0:
        raise ValueError
    return 1


def within(t: Tensor) -> int:
    with nullcontext():
        if t.any():
            raise ValueError
    return 1


def finally_(t: Tensor) -> int:
    try:
        if t.any():
            raise ValueError
    finally:
        len(t)
    return 1


def otherwise(t: Tensor) -> int:
    if (t < 1).all():
        return 1
    raise ValueError


def _record(function: Callable[[Tensor], Any], t: Tensor) -> list[SanityCheck]:
    recorder = CheckRecorder([t], sys._getframe().f_code)
    with recorder:
        assert function(t) == 1
    return recorder.checks


@pytest.mark.parametrize("function", [plain, negated, item, compound, guarded, within, finally_, otherwise])
def test_passes_as_eager_does_where_nothing_is_wrong(function: Callable[[Tensor], Any]) -> None:
    """Traced on what would raise, the check finds nothing; looked at later, it knows which arguments raise."""
    wrong, right = torch.tensor([9, 1]), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=""):
        function(wrong)
    checks = _record(function, wrong)
    assert all(check.steps is not None for check in checks)
    assert not all(check.holds([wrong]) for check in checks)
    assert all(check.holds([right]) for check in checks)


def branches(t: Tensor) -> int:
    return 1 if t.any() else 2


def caught(t: Tensor) -> int:
    try:
        if t.any():
            raise ValueError
    except ValueError:
        return 1
    return 2


def caught_outside(t: Tensor) -> int:
    try:
        return plain(t)
    except ValueError:
        return 1


def both(t: Tensor) -> int:
    try:
        if t.any():
            raise ValueError
        raise TypeError
    except (ValueError, TypeError):
        return 1


@pytest.mark.parametrize("function", [branches, caught, caught_outside, both])
def test_branches_are_no_checks(function: Callable[[Tensor], Any]) -> None:
    assert _record(function, torch.tensor([9, 1])) == []


def written(t: Tensor) -> int:
    t.add_(1)
    return plain(t)


def heavy(t: Tensor) -> int:
    return plain(t.float() @ t.float())


def chain(t: Tensor) -> int:
    total = t
    for _ in range(20):
        total = total + 1
    return plain(total)


@pytest.mark.parametrize("function", [written, heavy, chain])
def test_what_is_not_cheap_is_taken_for_granted(function: Callable[[Tensor], Any]) -> None:
    (check,) = _record(function, torch.tensor([9, 1]))
    assert check.steps is None and "taken for granted" in str(check)
    assert check.holds([torch.tensor([9, 1])])


@pytest.mark.parametrize(("p", "known"), [(0.0, True), (0.1, False)])
def test_coin_that_never_falls(p: float, known: bool) -> None:
    """Layers are left out by ``torch.rand([]) < p``, often with a ``p`` of zero."""

    def drops(t: Tensor) -> int:
        return 2 if torch.rand([], device="meta") < p else 1

    if known:
        assert _record(drops, torch.zeros(1)) == []
    else:
        with pytest.raises(RuntimeError, match="meta"):
            _record(drops, torch.zeros(1))


def log_probability(t: Tensor) -> int:
    torch.distributions.Bernoulli(torch.tensor(0.5), validate_args=True).log_prob(t)
    return 1


def test_samples_are_looked_at_before_each_call() -> None:
    """A distribution checks its parameters, which are no arguments here, and the sample, which is."""
    wrong, right = torch.tensor([9.0, 1.0]), torch.tensor([0.0, 1.0])
    parameter, sample = _record(log_probability, wrong)
    assert parameter.steps is None
    assert sample.steps is not None and "log_prob(t)" in str(sample)
    assert not sample.holds([wrong]) and sample.holds([right])


def caught_validation(t: Tensor) -> int:
    try:
        return log_probability(t)
    except ValueError:
        return 1


def test_validation_that_is_caught_is_a_branch() -> None:
    assert _record(caught_validation, torch.tensor([9.0, 1.0])) == []
