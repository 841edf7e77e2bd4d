# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Chooses tiles by what a device takes with them: a first look at all, a longer one at the fastest; right results only.

Others than those that are taken unasked win by more than noise alone, so that a choice is the same the next time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

GAIN = 0.03
"""What tiles must take less than those that are taken unasked, of the time of these."""

_EXACT, _OF_HALVES = 5e-6, 1e-4
_ROUNDED = {"f16": 2e-3, "bf16": 1.5e-2}

_FIRST, _LONG = 5, 21
_FINALISTS = 4
# What is this many times as slow at the first look is no finalist.
_HOPELESS = 1.3


def find_tolerance(taken: Iterable[str], given: str) -> float:
    """By how much results of an element type may differ, of their norm: sums in another order are rounded in another
    way, and rounded to 16 bits they are the next number. Matrix units cut off digits of sums of 16-bit products."""
    return _ROUNDED.get(given, _OF_HALVES if set(taken) & set(_ROUNDED) else _EXACT)


class Timer(Protocol):
    """Runs one question's kernels with tiles by their number, of which 0 are taken unasked."""

    def find_fault(self, number: int) -> str | None:
        """Why these tiles cannot win: they do not load, or their results are not those of number 0."""

    def time(self, numbers: Sequence[int], rounds: int) -> list[list[float]]:
        """Microseconds of each, in so many rounds that go through all of them."""


@dataclass(frozen=True)
class Measured:
    """The number of the tiles that are the fastest, the microseconds that they and number 0 take, both medians, and why
    others were left out, by number."""

    fastest: int
    microseconds: float
    unasked: float
    faults: dict[int, str]


def measure(count: int, timer: Timer) -> Measured:
    """The fastest of ``count`` tiles."""
    faults = {number: fault for number in range(count) if (fault := timer.find_fault(number)) is not None}
    if 0 in faults:
        return Measured(0, 0.0, 0.0, faults)
    sound = [number for number in range(count) if number not in faults]
    first = dict(zip(sound, map(statistics.median, timer.time(sound, _FIRST)), strict=True))
    hopeful = sorted((n for n in sound if n and first[n] < _HOPELESS * first[0]), key=lambda n: first[n])[:_FINALISTS]
    if not hopeful:
        return Measured(0, first[0], first[0], faults)
    times = dict(zip([0, *hopeful], timer.time([0, *hopeful], _LONG), strict=True))
    winners = [number for number in hopeful if is_faster(times[number], times[0])]
    fastest = min(winners, key=lambda number: statistics.median(times[number]), default=0)
    return Measured(fastest, statistics.median(times[fastest]), statistics.median(times[0]), faults)


def is_faster(times: Sequence[float], others: Sequence[float]) -> bool:
    """Whether times are shorter than others by more than noise: by ``GAIN`` in the median, and with three quarters of
    them below three quarters of the others."""
    _, middle, upper = statistics.quantiles(times, n=4)
    lower, other, _ = statistics.quantiles(others, n=4)
    return middle <= (1 - GAIN) * other and upper < lower
