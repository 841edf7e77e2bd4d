# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How long calls on the CPU took, and what follows for the next one: which threads it should have."""

from __future__ import annotations

# Waking local-task's workers and waiting for them takes some 50 us, which more threads must win back.
_SHORT_SECONDS = 200e-6
# From here on it pays to end the OpenMP threads that torch left behind, which takes some 50 us.
_LONG_SECONDS = 1e-3
_TRIALS = 3


class CallTimes:
    """Seconds that each function took on local-task's workers and in the calling thread.

    A function that is short on the workers is tried in the calling thread as often, and stays where it was faster; one
    that turns out to be long there, several times in a row (its sizes may differ from call to call), goes back for
    good.
    """

    def __init__(self) -> None:
        self._workers: dict[str, list[float]] = {}
        self._caller: dict[str, list[float]] = {}
        self._settled: dict[str, bool] = {}
        self._long: dict[str, int] = {}
        self._last: dict[str, float] = {}

    def prefers_caller(self, name: str) -> bool:
        """Whether the next call should run in the calling thread."""
        if (settled := self._settled.get(name)) is not None:
            return settled
        workers = self._workers.get(name, ())
        return len(workers) >= _TRIALS and min(workers) < _SHORT_SECONDS

    def is_long(self, name: str) -> bool:
        """Whether the next call is worth a preparation of 50 us; that is assumed of the first."""
        return self._last.get(name, _LONG_SECONDS) >= _LONG_SECONDS

    def record(self, name: str, in_caller: bool, seconds: float) -> None:
        """A call took so long."""
        self._last[name] = seconds
        if name in self._settled:
            # Not one alone: other processes take the thread's core for as long.
            self._long[name] = self._long.get(name, 0) + 1 if in_caller and seconds >= _LONG_SECONDS else 0
            if self._long[name] >= _TRIALS:
                self._settled[name] = False
            return
        times = (self._caller if in_caller else self._workers).setdefault(name, [])
        times.append(seconds)
        if len(times) < _TRIALS:
            return
        if in_caller:
            self._settled[name] = min(times) <= min(self._workers[name])
        elif min(times) >= _SHORT_SECONDS:
            self._settled[name] = False
