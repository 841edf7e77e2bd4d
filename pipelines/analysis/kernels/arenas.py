# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which of the memory that a caller gave up lies one behind another, as one arena, so that what is larger than each of
its members lies there too: buffers after the last use of the members that they cover, and results.

Members are sorted by their last use: what is dead is one piece then, which grows from the front.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from retrograd.pipelines.analysis.kernels.hosted_buffers import ALIGNMENT, LEAST_PLACED, MOST_LEFT, Host
from retrograd.pipelines.analysis.kernels.scratch_layout import Slice

MOST_BYTES = 1 << 30
"""Of an arena: places in it are numbers of 32 bits in IREE's kernels."""


@dataclass(frozen=True)
class Arena:
    """Members by number, in order, and where each begins; the last offset is the arena's size."""

    members: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def size(self) -> int:
        """The bytes of the arena."""
        return self.offsets[-1]

    def taken(self, hosts: Mapping[int, Host]) -> list[tuple[int, Slice]]:
        """Lists its members up to their last use, at which offsets."""
        begins = self.offsets[:-1]
        return [(o, Slice(0, hosts[m].last, hosts[m].size)) for o, m in zip(begins, self.members, strict=True)]


def can_join(host: Host) -> bool:
    """Whether memory may be a member: what is small is not worth it, and the next member begins where it ends."""
    return host.size >= LEAST_PLACED and host.size % ALIGNMENT == 0


def join(hosts: Mapping[int, Host], *, grows_down: bool = False) -> Arena:
    """An arena of hosts, by number, as many as there may be in one; what is dead grows from the front or from behind,
    ``grows_down``."""
    members = sorted(hosts, key=lambda number: (hosts[number].last, number), reverse=grows_down)
    offsets = [0, *accumulate(hosts[number].size for number in members)]
    count = sum(end <= MOST_BYTES for end in offsets) - 1
    return Arena(tuple(members[:count]), tuple(offsets[: count + 1]))


def fill_arena(results: Mapping[int, Slice], hosts: Mapping[int, Host]) -> tuple[Arena, dict[int, int]]:
    """An arena of some of the ``hosts`` that is there as long as a result that lies in it, and full of them but for a
    sixteenth; with it the offsets of ``results``, by number, one behind another in the order in which they are
    written. Those that are written before there is room for them have none."""
    whole = join(hosts)
    lasts = [hosts[member].last for member in whole.members]
    ends, placed = [0], list[int]()
    for number in sorted(results, key=lambda n: (results[n].first, -results[n].size)):
        part, end = results[number], ends[-1] + results[number].size
        if part.size >= LEAST_PLACED and end <= whole.size and lasts[_cover(whole, end) - 1] < part.first:
            placed.append(number)
            ends.append(end)
    while placed and ends[len(placed)] < (1 - MOST_LEFT) * whole.offsets[_cover(whole, ends[len(placed)])]:
        placed.pop()
    count = _cover(whole, ends[len(placed)])
    arena = Arena(whole.members[:count], whole.offsets[: count + 1])
    return arena, dict(zip(placed, ends, strict=False))


def _cover(arena: Arena, size: int) -> int:
    """How many of the first members have so many bytes together."""
    return bisect_left(arena.offsets, size)
