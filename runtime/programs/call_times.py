# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How long calls on the CPU took, and what follows for the next one: which threads it should have."""

from __future__ import annotations

# Waking local-task's workers and waiting for them takes some 50 us, which more threads must win back. On a machine that
# is busy with something else it takes ten milliseconds: how short a function is, only the calling thread tells.
_SHORT_SECONDS = 2e-3
_TRIED_SECONDS = 20e-3
# From here on it pays to end the OpenMP threads that torch left behind, which takes some 50 us.
_LONG_SECONDS = 1e-3
_TRIALS = 3
# Where other processes hold the cores, a function is found to be short only now and then.
_PATIENCE = 20


class CallTimes:
    """Seconds that the calls of one function took on local-task's workers and in the calling thread.

    A function that may be short is tried in the calling thread as often, and stays there if it is short and was no
    slower; two calls that take twice as long there are enough. One that turns out to be long there, several times in a
    row (its sizes may differ from call to call), goes back for good. ``prefers_caller``: the next call should run in
    the calling thread; ``is_long``: it is worth a preparation of 50 us, which is assumed of the first.
    One worker, ``is_alone``, does nothing that the calling thread does not do as fast: nothing is tried, and the latter
    has every call.
    """

    def __init__(self, *, is_alone: bool = False) -> None:
        self.prefers_caller = is_alone
        self.is_long = True
        self._is_alone = is_alone
        self._workers: list[float] = []
        self._caller: list[float] = []
        self._is_settled = False
        self._long_calls = 0

    @property
    def is_short(self) -> bool:
        """Whether the calling thread was found to be the faster."""
        return self._is_settled and self.prefers_caller

    def record(self, in_caller: bool, seconds: float) -> None:
        """A call took so long."""
        self.is_long = seconds >= _LONG_SECONDS
        if self._is_alone:
            # From when it is short on, tensors are looked for as they were then: in the first call, which is checked,
            # they are not as later.
            if not self._is_settled:
                self._caller.append(seconds)
                self._is_settled = len(self._caller) >= _TRIALS
            return
        if self._is_settled:
            # Not one alone: other processes take the thread's core for as long.
            self._long_calls = self._long_calls + 1 if in_caller and self.is_long else 0
            if self._long_calls >= _TRIALS:
                self.prefers_caller = False
            return
        times = self._caller if in_caller else self._workers
        times.append(seconds)
        if in_caller and len(times) == _TRIALS - 1 and min(times) > 2 * min(self._workers):
            self._settle(False)
        elif len(times) < _TRIALS:
            return
        elif in_caller:
            self._settle(min(times) <= min(_SHORT_SECONDS, *self._workers))
        elif min(times) < _TRIED_SECONDS:
            self.prefers_caller = True
        elif len(times) >= _PATIENCE:
            self._settle(False)

    def _settle(self, in_caller: bool) -> None:
        self.prefers_caller, self._is_settled = in_caller, True
