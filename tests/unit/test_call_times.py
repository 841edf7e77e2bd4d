# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which threads the next call of a function has, by how long the calls before took."""

from __future__ import annotations

from retrograd.runtime.programs.call_times import CallTimes

MICRO = 1e-6


def recorded(*calls: tuple[bool, float]) -> CallTimes:
    times = CallTimes()
    for in_caller, micros in calls:
        times.record(in_caller, micros * MICRO)
    return times


def test_short_calls_are_tried_in_the_caller() -> None:
    assert not recorded(*[(False, 60)] * 2).prefers_caller
    assert recorded(*[(False, 60)] * 3).prefers_caller


def test_the_faster_of_the_two_stays() -> None:
    assert recorded(*[(False, 60)] * 3, (True, 500), (True, 20), (True, 30)).prefers_caller
    assert not recorded(*[(False, 60)] * 3, *[(True, 90)] * 3).prefers_caller


def test_two_calls_that_are_much_slower_are_enough() -> None:
    assert recorded(*[(False, 900)] * 3, (True, 5000)).prefers_caller
    assert recorded(*[(False, 900)] * 3, (True, 5000), (True, 1700)).prefers_caller
    assert not recorded(*[(False, 900)] * 3, (True, 5000), (True, 1900)).prefers_caller


def test_a_busy_machine_is_no_reason_against_the_caller() -> None:
    """Its workers wait ten milliseconds for a core, whatever they have to do then."""
    assert recorded(*[(False, 1500)] * 3, *[(True, 20)] * 3).prefers_caller
    assert recorded(*[(False, 11_000)] * 3, *[(True, 1500)] * 3).prefers_caller


def test_calls_that_are_not_short_stay_on_the_workers() -> None:
    assert not recorded(*[(False, 25_000)] * 3).prefers_caller
    assert recorded(*[(False, 25_000)] * 10, (False, 60)).prefers_caller
    times = recorded(*[(False, 25_000)] * 20)
    assert not times.prefers_caller
    times.record(False, 10 * MICRO)
    assert not times.prefers_caller
    # No slower in the caller, but not short there either: a machine that is less busy has more than one thread for it.
    assert not recorded(*[(False, 11_000)] * 3, *[(True, 9000)] * 3).prefers_caller


def test_what_grows_long_in_the_caller_goes_back() -> None:
    times = recorded(*[(False, 60)] * 3, *[(True, 20)] * 3)
    for micros in (5000, 5000, 20, 5000, 5000):
        times.record(True, micros * MICRO)
        assert times.prefers_caller
    times.record(True, 5000 * MICRO)
    assert not times.prefers_caller


def test_the_first_call_and_long_ones_are_long() -> None:
    assert CallTimes().is_long
    assert recorded((False, 1500)).is_long
    assert not recorded((False, 1500), (False, 60)).is_long


def test_one_worker_is_no_faster_than_the_caller() -> None:
    """Whose first calls are not those by which later ones are made: a check watches them."""
    times = CallTimes(is_alone=True)
    short = []
    for _ in range(5):
        assert times.prefers_caller
        short.append(times.is_short)
        times.record(in_caller=True, seconds=1.0)
    assert short == [False, False, False, True, True]
