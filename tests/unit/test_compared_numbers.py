# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whether rounding decides a comparison is told by the numbers that are compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.verification.compared_numbers import find_comparisons

Function = Callable[[Tensor], Tensor]
# Multiplied by 3, numbers of a root mean square of about 1.
NUMBERS = torch.linspace(-0.6, 0.6, 41)


def explains(function: Function, argument: Tensor, change: Function) -> bool:
    """Whether each element that ``change`` changes in what ``function`` gives comes up where the numbers are moved."""
    comparisons = find_comparisons(make_fx(function, tracing_mode="fake")(argument), [0])
    if comparisons is None:
        return False
    runs = comparisons.run([argument], lambda head: head(argument * (1 + 1e-7)))
    (computed,) = next(runs)
    assert torch.equal(computed, function(argument))
    found = change(computed.clone())
    alike = found == computed
    for (run,) in runs:
        alike |= found == run
    return bool(alike.all())


def flip(*places: int) -> Function:
    return lambda mask: mask.index_put((torch.tensor(places),), ~mask[torch.tensor(places)])


def above(least: float) -> Function:
    return lambda x: x * 3 > least


@pytest.mark.parametrize("close", [2e-5, -2e-5])
def test_a_mask_hangs_on_numbers_that_are_close_to_the_threshold(close: float) -> None:
    least = float(NUMBERS[30] * 3) + close
    assert explains(above(least), NUMBERS, flip(30))
    assert not explains(above(least), NUMBERS, flip(31))
    assert not explains(above(least), NUMBERS, flip(30, 5))


def test_what_is_zero_stays_zero() -> None:
    def dead(x: Tensor) -> Tensor:
        return torch.relu(x * 3) <= 0

    assert not explains(dead, NUMBERS, flip(3))
    # The one in the middle is zero in front of the ReLU.
    assert not explains(dead, NUMBERS, flip(20))
    assert explains(dead, NUMBERS.index_fill(0, torch.tensor([3]), -1e-5), flip(3))


@pytest.mark.parametrize("same", [torch.ops.aten.alias.default, torch.ops.aten.detach.default])
def test_a_mask_behind_another_name_of_a_number_hangs_on_the_number(same: Function) -> None:
    def dead(x: Tensor) -> Tensor:
        return same(torch.relu(x * 3)) <= 0

    assert explains(dead, NUMBERS.index_fill(0, torch.tensor([3]), -1e-5), flip(3))
    assert not explains(dead, NUMBERS, flip(3))


def test_what_a_number_was_limited_to_stays_equal_to_it() -> None:
    def limited(x: Tensor) -> Tensor:
        return (x * 3).clamp(min=0.3) <= 0.3

    assert not explains(limited, NUMBERS, flip(3))


def test_equal_numbers_stay_equal() -> None:
    """The fault of a maximum that is compared with what was computed again."""

    def largest(x: Tensor) -> Tensor:
        y = x * 3
        return y == y.amax(0)

    def as_large(x: Tensor) -> Tensor:
        y = x * 3
        return y >= y.amax(0)

    assert not explains(largest, NUMBERS, flip(40))
    assert not explains(as_large, NUMBERS, flip(40))


def test_arguments_are_exact() -> None:
    assert not explains(lambda x: x > 0.5, NUMBERS, flip(int((NUMBERS > 0.5).nonzero()[0])))


def test_what_is_made_of_masks_hangs_on_the_same_numbers() -> None:
    def inside(x: Tensor) -> Tensor:
        y = x * 3
        return torch.where((y > -0.900001) & (y < 0.9), torch.arange(41), -1)

    assert explains(inside, NUMBERS, lambda places: places.where(torch.arange(41) != 30, 30 - places - 1))
    assert not explains(inside, NUMBERS, lambda places: places.where(torch.arange(41) != 20, -1))


def test_places_of_a_pooling_hang_on_numbers_that_are_almost_the_largest() -> None:
    x = torch.arange(16.0).view(1, 1, 4, 4) / 7
    x[0, 0, 1, 0] = x[0, 0, 1, 1] * (1 - 1e-6)

    def places(x: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.max_pool2d_with_indices.default(x * 1.1, [2, 2])[1]
        return found

    def put(place: int) -> Function:
        return lambda found: found.flatten().index_fill(0, torch.tensor([0]), place).view(found.shape)

    assert explains(places, x, put(4))
    assert not explains(places, x, put(0))
    # As large, and outside of the window.
    assert not explains(places, x.index_fill(3, torch.tensor([2]), float(x[0, 0, 1, 1])), put(6))


def test_drawn_numbers_tell_nothing_of_what_they_decide() -> None:
    drawn = make_fx(lambda x: torch.randint(3, (41,)) + (x * 2 > 0), tracing_mode="fake")(NUMBERS)
    assert find_comparisons(drawn, [0]) is None


def test_numbers_that_are_far_off_in_another_run_may_be_so_many_times_as_far() -> None:
    (other,) = make_fx(lambda x: (x * 3,), tracing_mode="fake")(NUMBERS)(NUMBERS * (1 + 1e-3))
    comparisons = find_comparisons(make_fx(above(1.77), tracing_mode="fake")(NUMBERS), [0])
    assert comparisons is not None
    # 1.8 may be off by 20 thousandths of it, 1.71 not by 0.06.
    found = [above(1.77)(NUMBERS) != run for (run,) in comparisons.run([NUMBERS], lambda _: [other])]
    changed = torch.stack(found).any(0)
    assert changed[40]
    assert not changed[:40].any()
