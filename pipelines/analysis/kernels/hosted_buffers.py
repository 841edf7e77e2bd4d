# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which buffers of a function lie in memory that its caller gave, while that holds nothing.

A caller gives storage for results before the function writes them: until then it is memory that is there anyway. What
scratch buffers lie in it, the block of scratch memory need not have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from retrograd.pipelines.analysis.kernels.scratch_layout import Slice, lay_out, live_bytes, peak_of

ALIGNMENT = 64
"""Of each buffer, on all devices: IREE's --iree-stream-resource-min-offset-alignment for CPUs."""

# Buffers are hosted one by one, and each time all that are alive at the fullest step are looked at.
_MOST_SLICES = 4000

# Results that are smaller have storage of their own: what they would save is not worth a place to remember.
_LEAST_PLACED = 1 << 14
# Of the memory that results are placed in, what may be left over: it is there as long as one of them.
_MOST_LEFT = 1 / 16

HOSTED = "bwd.hosted"
"""Of a ``stream.resource.pack``: the buffers that lie in hosts, by number."""


@dataclass(frozen=True)
class Host:
    """Memory of ``size`` bytes that holds something of its caller's from step ``first`` to step ``last``."""

    size: int
    first: int
    last: int


@dataclass(frozen=True)
class Place:
    """Where a buffer lies: the number of its host, and the offset there."""

    host: int
    offset: int


def place_results(
    results: Mapping[int, Slice], hosts: Mapping[int, Host], alone: Collection[int] = ()
) -> dict[int, Place]:
    """Places for some of ``results``, by number, in ``hosts`` that hold nothing any more when they are written, by
    number: the hosts, which are there as long as a result is, are full of them but for a sixteenth; those ``alone``
    take one of their size.

    Those that are written first come first: fewer hosts are free by then. Of hosts alike each takes the one that was
    free last, and leaves the others to what is written before it.
    """
    rooms = {number: _Room(host) for number, host in hosts.items()}
    placed: dict[int, Place] = {}
    for result in sorted(results, key=lambda n: (results[n].first, -results[n].size)):
        part = results[result]
        if part.size >= _LEAST_PLACED:
            fits = [
                (not room.taken, fit[0], -hosts[number].last, fit[1], number)
                for number, room in rooms.items()
                if (fit := room.find_gap(part)) is not None
                and (number not in alone or (room.host.size - part.size < ALIGNMENT and not room.taken))
            ]
            if fits:
                *_, offset, host = min(fits)
                rooms[host].taken.append((offset, part))
                placed[result] = Place(host, offset)
    filled = {host: sum(part.size for _, part in room.taken) for host, room in rooms.items() if room.taken}
    for host in sorted(filled, key=lambda h: filled[h] / hosts[h].size):
        if sum(filled.values()) >= (1 - _MOST_LEFT) * sum(hosts[h].size for h in filled):
            break
        del filled[host]
    return {number: place for number, place in placed.items() if place.host in filled}


def find_hosts(
    slices: Sequence[Slice],
    hosts: Sequence[Host],
    movable: Sequence[bool] | None = None,
    taken: Mapping[int, Sequence[tuple[int, Slice]]] | None = None,
) -> dict[int, Place]:
    """Places in hosts for some of ``slices``, by number: of those alive at the fullest step the largest, as long as one
    fits; and of all others too, where the block that is left has gaps and is smaller without them. ``movable`` says of
    each whether it may be hosted at all; ``taken`` what lies in a host already, at which offset.

    Offsets are multiples of the alignment, since sizes of slices are.
    """
    if not hosts or len(slices) > _MOST_SLICES:
        return {}
    rooms = [_Room(host, (taken or {}).get(number, ())) for number, host in enumerate(hosts)]
    able = [part.size > 0 and (movable is None or movable[number]) for number, part in enumerate(slices)]
    placed = _lower_peak(slices, able, rooms)
    left = [part for number, part in enumerate(slices) if number not in placed]
    size = lay_out(left, loose=False).size
    whole = lay_out(slices, loose=False).size
    if size > whole:
        # Layouts are found in a few orders: what is left may lie worse than all of them.
        return {}
    if size == peak_of(left):
        return placed
    others = [number for number in _by_size(slices, range(len(slices))) if able[number] and number not in placed]
    more = placed | {n: place for n in others if (place := _put(slices[n], rooms)) is not None}
    fewer = [part for number, part in enumerate(slices) if number not in more]
    return more if lay_out(fewer, loose=False).size < size else placed


def _lower_peak(slices: Sequence[Slice], able: Sequence[bool], rooms: Sequence[_Room]) -> dict[int, Place]:
    """Host slices that are alive at the fullest step, until none of them fits."""
    live = live_bytes(slices)
    firsts, lasts = (np.array([getattr(part, end) for part in slices], np.int64) for end in ("first", "last"))
    # What does not fit now does not later: rooms only fill up.
    waiting = np.array(able, bool)
    placed: dict[int, Place] = {}
    found = True
    while found and live.max(initial=0) > 0:
        step, found = int(live.argmax()), False
        (alive,) = np.nonzero(waiting & (firsts <= step) & (lasts >= step))
        for number in _by_size(slices, alive.tolist()):
            waiting[number] = False
            part = slices[number]
            if (place := _put(part, rooms)) is not None:
                placed[number], found = place, True
                live[part.first : part.last + 1] -= part.size
                break
    return placed


def _by_size(slices: Sequence[Slice], numbers: Iterable[int]) -> list[int]:
    """Sort numbers of slices: the largest first, of equal ones those that are alive for the shortest time."""
    return sorted(numbers, key=lambda n: (-slices[n].size, slices[n].last - slices[n].first))


def _put(part: Slice, rooms: Sequence[_Room]) -> Place | None:
    """Put a slice where the smallest gap is that it fits in; None where there is none."""
    fits = [(*fit, host) for host, room in enumerate(rooms) if (fit := room.find_gap(part)) is not None]
    if not fits:
        return None
    _, offset, host = min(fits)
    rooms[host].taken.append((offset, part))
    return Place(host, offset)


class _Room:
    """The room that there is in a host: offsets with slices."""

    def __init__(self, host: Host, taken: Sequence[tuple[int, Slice]] = ()) -> None:
        self.host = host
        self.taken = [*taken]

    def find_gap(self, part: Slice) -> tuple[int, int] | None:
        """The smallest gap that ``part`` fits in all the time that it is alive, and its offset."""
        host = self.host
        if part.size > host.size or (part.first <= host.last and host.first <= part.last):
            return None
        rivals = sorted((o, s.size) for o, s in self.taken if s.first <= part.last and part.first <= s.last)
        best: tuple[int, int] | None = None
        free = 0
        for start, size in (*rivals, (host.size, 0)):
            gap = start - free
            if gap >= part.size and (best is None or gap < best[0]):
                best = (gap, free)
            free = max(free, start + size)
        return best
