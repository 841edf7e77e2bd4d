# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Numbers that are drawn between two, and comparisons that decide whatever is drawn."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd.frontend.python.coins import COINS, Coin, coin_of
from retrograd.frontend.python.source_locations import CaptureError


def coin(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Coin:
    found = coin_of(function, args, kwargs)
    assert found is not None
    return found


@pytest.mark.parametrize("bound", [-0.5, 0, 0.0, 0.3, 1, 1.0, 1.5])
@pytest.mark.parametrize("function", sorted(COINS, key=str))
def test_what_is_decided_is_so_for_every_number(function: Callable[..., Any], bound: float) -> None:
    """Compared with the ends of the interval, and a number between them."""
    args = (0.0, 1.0) if function is random.uniform else ()
    most = 1.0 if "uniform" in str(function) else np.nextafter(1.0, 0.0)
    for compare in (operator.lt, operator.le, operator.gt, operator.ge):
        answers = {bool(compare(drawn, bound)) for drawn in (0.0, 0.5, most)}
        if len(answers) == 1:
            assert {compare(coin(function, *args), bound)} == answers
        else:
            with pytest.raises(CaptureError, match="goes by a number"):
                compare(coin(function, *args), bound)


def test_bounds_that_are_given() -> None:
    assert coin(random.uniform, 2, 1) >= 1
    assert coin(np.random.uniform, low=3.0) >= 1.0
    assert coin(np.random.uniform, 1, high=2) <= 2
    assert coin_of(np.random.rand, (3,), {}) is None
    assert coin_of(np.random.uniform, (0, 1, 4), {}) is None
    assert coin_of(np.random.uniform, (np.zeros(2),), {}) is None


@pytest.mark.parametrize(
    "use", [bool, float, str, lambda c: c + 1, lambda c: 2 - c, lambda c: c == 1, hash, np.asarray]
)
def test_any_other_use_is_refused(use: Callable[[Coin], Any]) -> None:
    with pytest.raises(CaptureError, match="goes by a number"):
        use(coin(random.random))


@pytest.mark.parametrize("bound", [float("nan"), "1", None])
def test_what_orders_nothing_decides_nothing(bound: Any) -> None:
    with pytest.raises(CaptureError, match="goes by a number"):
        assert coin(random.random) < bound
