# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which buffers of a function lie in memory that its caller gave, while that holds nothing.

A caller gives storage for results before the function writes them: until then it is memory that is there anyway. What
scratch buffers lie in it, the block of scratch memory need not have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from retrograd.pipelines.analysis.kernels.scratch_layout import Slice, lay_out, live_bytes, peak_of

ALIGNMENT = 64
"""Of each buffer, on all devices: IREE's --iree-stream-resource-min-offset-alignment for CPUs."""

# Buffers are hosted one by one, and each time all that are alive at the fullest step are looked at: of 2,000 that takes
# a third of a second for each rule.
_MOST_SLICES, _MOST_COMPARED = 4000, 1000

# Results that are smaller have storage of their own: what they would save is not worth a place to remember.
LEAST_PLACED = 1 << 14
# Of the memory that results are placed in, what may be left over: it is there as long as one of them.
MOST_LEFT = 1 / 16

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


@dataclass(frozen=True)
class _Rule:
    """An order to host slices in, and whether each goes where the host is free for the fewest steps before or after it,
    so that others are left for what is alive longer; else it goes to the smallest gap."""

    order: Callable[[Slice], tuple[int, ...]]
    is_close: bool


def _shortest(part: Slice) -> tuple[int, ...]:
    return (-part.size, part.last - part.first)


def _longest(part: Slice) -> tuple[int, ...]:
    return (-part.size, part.first - part.last)


# Which slices of a size are hosted first, as there is seldom room for all: no rule is the best of every function. The
# first whose block is as small as it can be is taken.
_RULES = (_Rule(_shortest, False), _Rule(_shortest, True), _Rule(_longest, False), _Rule(_longest, True))


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
        if part.size >= LEAST_PLACED:
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
        if sum(filled.values()) >= (1 - MOST_LEFT) * sum(hosts[h].size for h in filled):
            break
        del filled[host]
    return {number: place for number, place in placed.items() if place.host in filled}


def place_largest(
    results: Mapping[int, Slice],
    hosts: Mapping[int, Host],
    taken: Mapping[int, Sequence[tuple[int, Slice]]],
    most: int,
) -> dict[int, Place]:
    """Places for the largest of ``results``, by number, of ``most`` bytes together, in ``hosts`` that hold nothing any
    more when they are written, where others lie already, ``taken``. Of hosts that fit each takes the one that was free
    last, and leaves the others to what is written before it."""
    rooms = {number: _Room(host, taken.get(number, ())) for number, host in hosts.items()}
    placed: dict[int, Place] = {}
    for result in sorted(results, key=lambda n: (-results[n].size, results[n].first)):
        part = results[result]
        if not LEAST_PLACED <= part.size <= most:
            continue
        fits = [
            (-hosts[number].last, *fit, number)
            for number, room in rooms.items()
            if (fit := room.find_gap(part)) is not None
        ]
        if fits:
            *_, offset, host = min(fits)
            rooms[host].taken.append((offset, part))
            placed[result] = Place(host, offset)
            most -= part.size
    return placed


def find_hosts(
    slices: Sequence[Slice],
    hosts: Sequence[Host],
    movable: Sequence[bool] | None = None,
    taken: Mapping[int, Sequence[tuple[int, Slice]]] | None = None,
    open_hosts: Collection[int] = (),
) -> dict[int, Place]:
    """Places in hosts for some of ``slices``, by number: of those alive at the fullest step the largest, as long as one
    fits; and of all others too, where the block that is left has gaps and is smaller without them. ``movable`` says of
    each whether it may be hosted anywhere, the others go to ``open_hosts`` alone; ``taken`` is what lies in a host
    already, at which offset.

    Offsets are multiples of the alignment, since sizes of slices are.
    """
    if not hosts or len(slices) > _MOST_SLICES:
        return {}
    anywhere = [movable is None or movable[number] for number in range(len(slices))]
    able = [part.size > 0 and (anywhere[number] or bool(open_hosts)) for number, part in enumerate(slices)]
    least = _least_block(slices, hosts, able, taken or {})
    best: dict[int, Place] = {}
    smallest = lay_out(slices, loose=False).size
    # Layouts are found in a few orders: what is left may lie worse than all of them.
    for rule in _RULES if len(slices) <= _MOST_COMPARED else _RULES[:1]:
        rooms = [_Room(host, (taken or {}).get(number, ()), number in open_hosts) for number, host in enumerate(hosts)]
        found = _fill(_Task(slices, able, anywhere), rooms, rule)
        size = lay_out([part for number, part in enumerate(slices) if number not in found], loose=False).size
        if size < smallest or (size == smallest and not best):
            best, smallest = found, size
        if smallest <= least:
            break
    return best


def _least_block(
    slices: Sequence[Slice],
    hosts: Sequence[Host],
    able: Sequence[bool],
    taken: Mapping[int, Sequence[tuple[int, Slice]]],
) -> int:
    """Bytes that no choice of places goes below: at each step what may not move, and what all hosts that are free then
    have no room for."""
    live = live_bytes(slices)
    fixed = live_bytes([Slice(p.first, p.last, 0 if able[n] else p.size) for n, p in enumerate(slices)])
    room = np.zeros(len(live), np.int64)
    for number, host in enumerate(hosts):
        room += host.size
        room[max(host.first, 0) : host.last + 1] -= host.size
        for _, part in taken.get(number, ()):
            room[max(part.first, 0) : part.last + 1] -= part.size
    return int(np.maximum(fixed, live - room).max(initial=0))


@dataclass(frozen=True)
class _Task:
    """Slices, which of them are ``able`` to be hosted, and which ``anywhere``: the others in open rooms alone."""

    slices: Sequence[Slice]
    able: Sequence[bool]
    anywhere: Sequence[bool]

    def put(self, number: int, rooms: Sequence[_Room], rule: _Rule) -> Place | None:
        """Put a slice where the rule has it go, of all gaps that it fits in; None where there is none."""
        part = self.slices[number]
        fits = [
            (room.idle(part) if rule.is_close else 0, *fit, host)
            for host, room in enumerate(rooms)
            if (self.anywhere[number] or room.is_open) and (fit := room.find_gap(part)) is not None
        ]
        if not fits:
            return None
        *_, offset, host = min(fits)
        rooms[host].taken.append((offset, part))
        return Place(host, offset)


def _fill(task: _Task, rooms: Sequence[_Room], rule: _Rule) -> dict[int, Place]:
    """Host what is alive at the fullest step; and all others too, where the block that is left has gaps and is smaller
    without them."""
    slices, able = task.slices, task.able
    placed = _lower_peak(task, rooms, rule)
    left = [part for number, part in enumerate(slices) if number not in placed]
    size = lay_out(left, loose=False).size
    if size == peak_of(left):
        return placed
    others = [n for n in _sorted(slices, range(len(slices)), rule) if able[n] and n not in placed]
    more = placed | {n: place for n in others if (place := task.put(n, rooms, rule)) is not None}
    fewer = [part for number, part in enumerate(slices) if number not in more]
    return more if lay_out(fewer, loose=False).size < size else placed


def _lower_peak(task: _Task, rooms: Sequence[_Room], rule: _Rule) -> dict[int, Place]:
    """Host slices that are alive at the fullest step, until none of them fits."""
    slices = task.slices
    live = live_bytes(slices)
    firsts, lasts = (np.array([getattr(part, end) for part in slices], np.int64) for end in ("first", "last"))
    # What does not fit now does not later: rooms only fill up.
    waiting = np.array(task.able, bool)
    placed: dict[int, Place] = {}
    found = True
    while found and live.max(initial=0) > 0:
        step, found = int(live.argmax()), False
        (alive,) = np.nonzero(waiting & (firsts <= step) & (lasts >= step))
        for number in _sorted(slices, alive.tolist(), rule):
            waiting[number] = False
            part = slices[number]
            if (place := task.put(number, rooms, rule)) is not None:
                placed[number], found = place, True
                live[part.first : part.last + 1] -= part.size
                break
    return placed


def _sorted(slices: Sequence[Slice], numbers: Iterable[int], rule: _Rule) -> list[int]:
    """Sort numbers of slices in the order in which they are hosted."""
    return sorted(numbers, key=lambda n: rule.order(slices[n]))


class _Room:
    """The room that there is in a host: offsets with slices. One that ``is_open`` is for all of them."""

    def __init__(self, host: Host, taken: Sequence[tuple[int, Slice]] = (), is_open: bool = False) -> None:
        self.host = host
        self.taken = [*taken]
        self.is_open = is_open

    def idle(self, part: Slice) -> int:
        """For how many steps the host holds nothing of its caller's between that and ``part``."""
        return part.first - self.host.last if self.host.last < part.first else self.host.first - part.last

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
