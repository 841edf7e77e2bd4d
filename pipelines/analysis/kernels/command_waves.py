# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which commands of a list can run at the same time, by the bytes that they read and write.

Two commands depend on one another where both touch a byte and one of them writes it. A command runs in the wave behind
the last that it depends on: with places in memory given, there are no fewer waves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

END = 1 << 62
"""Where a range ends of which the end is not known."""


@dataclass(frozen=True)
class Access:
    """Bytes ``start`` to ``stop`` of a resource, that are read, or written and perhaps read."""

    resource: int
    start: int
    stop: int
    writes: bool


@dataclass
class _Bytes:
    """The bytes of a resource in ranges, each with the first wave in which it may be read and that in which it may be
    written."""

    starts: list[int] = field(default_factory=lambda: [0])
    readable: list[int] = field(default_factory=lambda: [0])
    writable: list[int] = field(default_factory=lambda: [0])

    def earliest(self, access: Access) -> int:
        """The first wave in which an access may be."""
        return max((self.writable if access.writes else self.readable)[self._find(access)], default=0)

    def record(self, access: Access, wave: int) -> None:
        """Have what touches these bytes run behind ``wave``: all where they are written, else what writes them."""
        ranges = self._find(access)
        for place in range(ranges.start, ranges.stop):
            self.writable[place] = max(self.writable[place], wave + 1)
            if access.writes:
                self.readable[place] = wave + 1

    def _find(self, access: Access) -> slice:
        """The ranges that an access touches, of which the first and the last are cut at its ends."""
        return slice(self._cut(access.start), self._cut(access.stop))

    def _cut(self, at: int) -> int:
        """Have a range begin ``at``; returns its place."""
        place = bisect_left(self.starts, at)
        if place == len(self.starts) or self.starts[place] != at:
            self.starts.insert(place, at)
            self.readable.insert(place, self.readable[place - 1])
            self.writable.insert(place, self.writable[place - 1])
        return place


def find_waves(commands: Sequence[Sequence[Access] | None]) -> list[int]:
    """The wave of each command, from 0, given what it accesses; None stands for a command of which that is not known,
    which runs by itself."""
    resources: defaultdict[int, _Bytes] = defaultdict(_Bytes)
    waves: list[int] = []
    first = end = 0
    for accesses in commands:
        if accesses is None:
            waves.append(end)
            first = end = end + 1
            continue
        wave = max((resources[access.resource].earliest(access) for access in accesses), default=0)
        wave = max(wave, first)
        for access in accesses:
            resources[access.resource].record(access, wave)
        waves.append(wave)
        end = max(end, wave + 1)
    return waves
