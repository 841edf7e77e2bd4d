# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where the buffers of a function's scratch memory, and its results, are to lie: of several choices the one that takes
the fewest bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrograd.pipelines.analysis.kernels.arenas import Arena, can_join, fill_arena, join
from retrograd.pipelines.analysis.kernels.hosted_buffers import (
    ALIGNMENT,
    Host,
    Place,
    find_hosts,
    place_largest,
    place_results,
)
from retrograd.pipelines.analysis.kernels.scratch_layout import Layout, Slice, lay_out
from retrograd.pipelines.stream.result_storage import JOINED, Scratch, Storage

# When a backward begins few residuals are dead, and what its first gradients take of them for good the buffers of the
# fullest steps are without: that many of them, as a part of all, have storage of their own, where it is less.
_OWN_PARTS = (0.0, 1 / 32, 1 / 16, 1 / 8)
_OWN_PARTS_OF_ARENAS = (*_OWN_PARTS, 1 / 4)
# Of functions of more buffers less is tried: for each choice that takes seconds.
_MOST_TRIED = 1000
# What may be copied when the function has returned, of all that the caller gives up and that is read at least once.
_MOST_COPIED = 1 / 16
_NOTHING = Host(0, 0, 0)

LEAST_GAIN = 1 / 100
"""What arenas have to save, of all that the caller gives up and gets and the block."""


@dataclass(frozen=True)
class Choice:
    """Where results lie, by the number of their storage: in one that was given up, or in an arena of such. Arenas have
    the numbers behind those of the storages. Those ``copied`` lie there until the function returns."""

    placed: dict[int, Place]
    arenas: tuple[Arena, ...] = ()
    copied: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Packing:
    """Where the buffers of a pack go: in hosts by number, the others in a block; None for one that is hosted. Results
    and hosts are as the ``choice`` has them."""

    pack: Any
    layout: Layout
    block: tuple[int | None, ...]
    scratch: Scratch | None
    hosted: dict[int, Place]
    choice: Choice

    @property
    def size(self) -> int:
        """Bytes of the block, or of what is copied when there is no block any more; less those of results that need no
        storage of their own while the function runs."""
        storages = self.scratch.storages if self.scratch is not None else []
        placed, copied = (
            sum(storages[number].host.size for number in numbers)
            for numbers in (self.choice.placed, self.choice.copied)
        )
        return max(self.layout.size, copied) - placed


def plan_block(pack: Any, slices: Sequence[Slice], loose: bool) -> Packing:
    """All buffers in a block; ``loose`` is as for :func:`lay_out`."""
    layout = lay_out(slices, loose=loose)
    return Packing(pack, layout, (*layout.offsets,), None, {}, Choice({}))


def plan_hosted(scratch: Scratch, slices: Sequence[Slice], loose: bool) -> Packing:
    """Buffers in the caller's storages, as far as there is room, and the others in a block; of choices alike the first
    that there is."""
    # IREE's steps are others: they count ops that are no command in the end.
    slices = [_alive(part, scratch.lives.get(number)) for number, part in enumerate(slices)]
    plain = _choose_places(scratch.storages)
    found = [_host(scratch, slices, False, choice) for choice in plain]
    best = min(found, key=lambda packing: packing.size)
    tried = plain if len(slices) <= _MOST_TRIED else [best.choice]
    parts = _OWN_PARTS_OF_ARENAS if len(slices) <= _MOST_TRIED else _OWN_PARTS[-1:]
    joined = [*_fill_arenas(scratch.storages, parts), *_join_rest(scratch.storages, tried)]
    arenas = (_host(scratch, slices, False, choice) for choice in joined)
    smallest = min(arenas, key=lambda packing: packing.size, default=best)
    whole = sum(storage.host.size for storage in scratch.storages) + best.size
    if best.size - smallest.size > LEAST_GAIN * whole:
        best = smallest
    bare = Choice({})
    choices = [bare, *_join_rest(scratch.storages, [bare]), best.choice]
    smallest = min(_copy_some(scratch, slices, choices), key=lambda packing: packing.size, default=best)
    if best.size - smallest.size > LEAST_GAIN * whole:
        best = smallest
    return _host(scratch, slices, True, best.choice) if loose else best


def _copy_some(scratch: Scratch, slices: Sequence[Slice], choices: Sequence[Choice]) -> Iterator[Packing]:
    """The choices with results that had storage of their own in what is dead, to be copied when the function has
    returned: the largest of them, up to a part of all that was given up."""
    storages = scratch.storages
    hosts = {number: storage.host for number, storage in enumerate(storages)}
    most = _MOST_COPIED * sum(storage.host.size for storage in storages if storage.is_given_up)
    for choice in choices:
        own = {number: part for number, part in _results(storages, 0).items() if number not in choice.placed}
        rooms, taken = _find_rooms(scratch, choice), read_taken(hosts, choice)
        able = [n for n, room in enumerate(rooms) if n >= len(storages) or storages[n].takes != "none"]
        found = place_largest(own, {n: rooms[n] for n in able}, taken, int(most))
        if found:
            yield _host(scratch, slices, False, Choice({**choice.placed, **found}, choice.arenas, frozenset(found)))


def _choose_places(storages: Sequence[Storage]) -> list[Choice]:
    """Lists what is tried without arenas."""
    choices = [Choice({})]
    for part in _OWN_PARTS:
        choice = Choice(place_in_storages(storages, part))
        choices += [choice] if choice not in choices else []
    return choices


def _fill_arenas(storages: Sequence[Storage], parts: Sequence[float]) -> list[Choice]:
    """An arena that is full of results, and one of the other storages."""
    hosts, choices = _joinable(storages), list[Choice]()
    for part in parts if hosts else ():
        filled, offsets = fill_arena(_results(storages, part), hosts)
        if offsets:
            rest = _join_others(hosts, filled.members)
            places = {number: Place(len(storages), offset) for number, offset in offsets.items()}
            choice = Choice(places, (filled, rest) if rest.members else (filled,))
            choices += [choice] if choice not in choices else []
    return choices


def _join_rest(storages: Sequence[Storage], choices: Sequence[Choice]) -> Iterator[Choice]:
    """The choices with all that no result lies in joined to an arena."""
    for choice in choices:
        rest = _join_others(_joinable(storages), {place.host for place in choice.placed.values()})
        if len(rest.members) > 1:
            yield Choice(choice.placed, (rest,))


def _join_others(hosts: Mapping[int, Host], used: Collection[int]) -> Arena:
    return join({number: host for number, host in hosts.items() if number not in used}, grows_down=True)


def _joinable(storages: Sequence[Storage]) -> dict[int, Host]:
    """The storages, by number, that may be members of an arena."""
    return {n: s.host for n, s in enumerate(storages) if s.takes == JOINED and s.is_movable and can_join(s.host)}


def _results(storages: Sequence[Storage], own: float) -> dict[int, Slice]:
    """The results that could be elsewhere than in storage of their own; of these the first that are written, this part
    of them, are left out."""
    results = {
        number: whole_slice(s.host.first, s.host.last, s.host.size)
        for number, s in enumerate(storages)
        if not s.is_given_up and s.is_movable
    }
    by_step = sorted(results, key=lambda number: results[number].first)
    for number in by_step[: math.ceil(own * len(by_step))]:
        del results[number]
    return results


def place_in_storages(storages: Sequence[Storage], own: float) -> dict[int, Place]:
    """Places for results in single storages that were given up, by number; the first, this part of them, have none."""
    hosts = {number: s.host for number, s in enumerate(storages) if s.takes != "none"}
    results = _results(storages, own)
    return place_results(results, hosts, [number for number in hosts if storages[number].takes == "one"])


def whole_slice(first: int, last: int, size: int) -> Slice:
    """A slice of a multiple of the alignment, behind which another may begin."""
    return Slice(first, last, -(-size // ALIGNMENT) * ALIGNMENT)


def _host(scratch: Scratch, slices: Sequence[Slice], loose: bool, choice: Choice) -> Packing:
    """Plan a pack whose buffers may lie in storages and arenas, with results and arenas as chosen."""
    movable = [scratch.is_computed(number) for number in range(len(slices))]
    hosts = {number: storage.host for number, storage in enumerate(scratch.storages)}
    rooms = _find_rooms(scratch, choice)
    # An arena is imported for copies once for all that lies there, which takes 13 us.
    arenas = range(len(hosts), len(rooms))
    hosted = find_hosts(slices, rooms, movable, read_taken(hosts, choice), arenas)
    numbers = [number for number in range(len(slices)) if number not in hosted]
    layout = lay_out([slices[number] for number in numbers], loose=loose)
    offsets = dict(zip(numbers, layout.offsets, strict=True))
    block = tuple(offsets.get(number) for number in range(len(slices)))
    return Packing(scratch.pack, layout, block, scratch, hosted, choice)


def _find_rooms(scratch: Scratch, choice: Choice) -> list[Host]:
    """The storages, and behind them the arenas, as there is room in them."""
    members = {number for arena in choice.arenas for number in arena.members}
    # Storage that a result does not have holds nothing, and members are a part of another.
    rooms = [
        _NOTHING if number in choice.placed or number in members else storage.host
        for number, storage in enumerate(scratch.storages)
    ]
    # Of an arena there are places at any time.
    return rooms + [Host(arena.size, 0, -1) for arena in choice.arenas]


def read_taken(hosts: Mapping[int, Host], choice: Choice) -> dict[int, list[tuple[int, Slice]]]:
    """List what results, and members of arenas, have of each host, at which offset."""
    taken = {len(hosts) + place: arena.taken(hosts) for place, arena in enumerate(choice.arenas)}
    for number, place in choice.placed.items():
        part = whole_slice(hosts[number].first, hosts[number].last, hosts[number].size)
        taken.setdefault(place.host, []).append((place.offset, part))
    return taken


def _alive(part: Slice, steps: tuple[int, int] | None) -> Slice:
    """A slice from the first step that accesses it to the last; of no size where none does."""
    return Slice(*steps, part.size) if steps is not None else Slice(0, 0, 0)
