# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whether the host holds a device back: how much of the time that calls take on the device it queues them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

# Of the device's time: where queueing takes less, the device has work waiting, and a graph would gain little.
_BOUND = 0.8
_TIMED_CALLS = 3

Reading = Callable[[], float | None]


class Clock(Protocol):
    """Times a call on the host and on a device, without waiting for either."""

    def time(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], Reading]:
        """The results of ``run``, and what reads the host's time over the device's; it reads None until the device has
        done the work."""


class CudaClock:
    """Times calls by events on the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def time(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], Reading]:
        """As :class:`Clock`."""
        stream = torch.cuda.current_stream(self._device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        began = time.perf_counter()
        results = run()
        seconds = time.perf_counter() - began
        end.record(stream)
        return results, lambda: 1e3 * seconds / max(start.elapsed_time(end), 1e-3) if end.query() else None


class HostShare:
    """Times some calls of a function, and says then whether the host holds the device back in them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._readings: list[Reading] = []
        self._share: float | None = None

    @property
    def share(self) -> float | None:
        """The host's time over the device's, the median of the calls; None while it is not known."""
        if self._share is None and len(self._readings) == _TIMED_CALLS:
            read = [reading() for reading in self._readings]
            known = [value for value in read if value is not None]
            self._share = statistics.median(known) if len(known) == len(read) else None
        return self._share

    @property
    def is_bound(self) -> bool | None:
        """Whether the host holds the device back; None while that is not known."""
        return None if self.share is None else self.share >= _BOUND

    def run(self, call: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """The results of a call, which is timed as long as more are asked for."""
        if len(self._readings) == _TIMED_CALLS:
            return call()
        results, reading = self._clock.time(call)
        self._readings.append(reading)
        return results
