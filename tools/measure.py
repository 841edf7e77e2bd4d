# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Measures tiles on a CUDA device for a parent, whose own work on the device a kernel must not bring down.

JSON goes in and out. A line in is a list of `Work`, one for each choice of tiles, the first of which are taken unasked;
a line out is what :func:`measure` found.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Protocol

import torch

from retrograd.contract.reading import read_plain
from retrograd.contract.trials import Work
from retrograd.runtime.cuda.trials import Bench, Prepared, find_difference
from retrograd.runtime.programs.errors import ExecutionError


class DeviceTimer:
    """Times the works of one question on a device; as `Timer`."""

    def __init__(self, bench: Bench, works: Sequence[Work], stack: ExitStack) -> None:
        self._bench, self._works, self._stack = bench, works, stack
        self._inputs: list[torch.Tensor] = []
        self._prepared: dict[int, Prepared] = {}
        self._expected: list[torch.Tensor] = []
        self._tolerance = find_tolerance({b.element for b in works[0].inputs}, works[0].element)

    def find_fault(self, number: int) -> str | None:
        """Find a fault of a choice, as `Timer` declares; a choice for which the device has too little memory has
        one."""
        try:
            if number == 0:
                return self._find_first_fault()
            prepared, found = self._prepare(number)
        except (ExecutionError, torch.cuda.OutOfMemoryError) as error:
            return str(error)
        if (difference := find_difference(found, self._expected)) > self._tolerance:
            return f"what it gives differs by {difference:.1e}"
        self._prepared[number] = prepared
        return None

    def _find_first_fault(self) -> str | None:
        """Find the first fault. Logarithms and roots of negative numbers are none, so that numbers that are not
        negative are tried then."""
        for positive in (False, True):
            self._inputs = self._bench.make_inputs(self._works[0].inputs, positive=positive)
            self._prepared[0], self._expected = self._prepare(0)
            if all(bool(tensor.isfinite().all()) for tensor in self._expected):
                return None
        return "what it gives on random numbers is not finite"

    def _prepare(self, number: int) -> tuple[Prepared, list[torch.Tensor]]:
        prepared = self._stack.enter_context(self._bench.prepare(self._works[number], self._inputs))
        return prepared, prepared.results()

    def time(self, numbers: Sequence[int], rounds: int) -> list[list[float]]:
        """Time the choices, as `Timer` declares."""
        return self._bench.time([self._prepared[number] for number in numbers], rounds)


def main() -> int:
    """Answer one line after the other, until there are none."""
    bench = Bench(torch.device("cuda", int(sys.argv[1])))
    print(json.dumps(bench.name), flush=True)
    for line in sys.stdin:
        works = [read_plain(Work, fields, "work") for fields in json.loads(line)]
        with ExitStack() as stack:
            found = measure(len(works), DeviceTimer(bench, works, stack))
        print(json.dumps(asdict(found)), flush=True)
        torch.cuda.empty_cache()
    return 0


GAIN = 0.03
"""What tiles must take less than those that are taken unasked, of the time of these."""

_EXACT, _OF_HALVES = 5e-6, 1e-4
_ROUNDED = {"f16": 2e-3, "bf16": 1.5e-2}

_FIRST, _LONG = 5, 21
_FINALISTS = 4
# What is this many times as slow at the first look is no finalist.
_HOPELESS = 1.3


def find_tolerance(taken: Iterable[str], given: str) -> float:
    """The difference that results of an element type may have, relative to their norm: sums in another order are
    rounded in another way, and rounded to 16 bits they are the next number. Matrix units cut off digits of sums of
    16-bit products."""
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


if __name__ == "__main__":
    sys.exit(main())
