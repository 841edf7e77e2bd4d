# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which commands of a group, that could run side by side, run one after another so that less memory is alive at the
fullest step: one of them may end the life of what another's results take the place of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

# Groups that are parted, one after another, and commands of one that all orders are tried of.
_MOST_PARTED, _MOST_TRIED = 64, 4


@dataclass(frozen=True)
class Memory:
    """Memory of ``size`` bytes that commands access, by number: it holds something from the first of them to the last,
    from the beginning where it is ``given``, and to the end where it is ``kept``."""

    size: int
    commands: frozenset[int]
    is_given: bool = False
    is_kept: bool = False


def part_groups(steps: Sequence[Sequence[int]], memory: Sequence[Memory]) -> list[list[int]]:
    """``steps``, each of commands that run side by side, with some of them parted: the fullest one as long as that is
    less full then. What runs side by side at no cost still does."""
    parted = [[*step] for step in steps]
    for _ in range(_MOST_PARTED):
        live = find_live(parted, memory)
        fullest = int(live.argmax()) if len(live) else 0
        if not len(live) or len(parted[fullest]) < 2:
            break
        others = int(np.delete(live, fullest).max(initial=0))
        parts, peak = _part(parted, fullest, memory, int(live[fullest]), others)
        if peak >= int(live[fullest]):
            break
        parted[fullest : fullest + 1] = parts
    return parted


def find_live(steps: Sequence[Sequence[int]], memory: Iterable[Memory]) -> np.ndarray:
    """Bytes alive at each step."""
    places = {command: place for place, step in enumerate(steps) for command in step}
    changes = np.zeros(len(steps) + 1, np.int64)
    for part in memory:
        found = [places[command] for command in part.commands]
        if found:
            changes[0 if part.is_given else min(found)] += part.size
            changes[len(steps) if part.is_kept else max(found) + 1] -= part.size
    return np.cumsum(changes)[:-1]


def _part(
    steps: Sequence[Sequence[int]], number: int, memory: Sequence[Memory], fullness: int, others: int
) -> tuple[list[list[int]], int]:
    """The parts of a step, and how full the fullest of them is: in the order where that is least; together those that
    are no fuller than that, or than the ``others``. The step is as full as ``fullness`` says."""
    commands = steps[number]
    before, after = [c for step in steps[:number] for c in step], [c for step in steps[number + 1 :] for c in step]
    near = [part for part in memory if not part.commands.isdisjoint(commands)]
    # What no command of the step accesses is there beside each of them, or beside none.
    beside = fullness - int(find_live([before, [*commands], after], near)[1])

    def peak(parts: Sequence[Sequence[int]]) -> int:
        return beside + int(find_live([before, *parts, after], near)[1:-1].max())

    if len(commands) <= _MOST_TRIED:
        parts = min(([[c] for c in order] for order in permutations(commands)), key=peak)
    else:
        parts = [[command] for command in _least_first(before, commands, near)]
    lowest = peak(parts)
    place = 0
    while place + 1 < len(parts):
        joined = [*parts[:place], parts[place] + parts[place + 1], *parts[place + 2 :]]
        if peak(joined) <= max(lowest, min(others, fullness - 1)):
            parts = joined
        else:
            place += 1
    return parts, peak(parts)


def _least_first(before: Sequence[int], commands: Sequence[int], near: Sequence[Memory]) -> list[int]:
    """The commands in an order: each time that which leaves the fewest bytes alive, of those that ran ``before``."""
    done, waiting, order = {*before}, [*commands], list[int]()

    def left(command: int) -> int:
        """Bytes that begin with a command, less those that end with it."""
        return sum(
            part.size * (not part.is_given and part.commands.isdisjoint(done))
            - part.size * (not part.is_kept and part.commands <= done | {command})
            for part in near
            if command in part.commands
        )

    while waiting:
        least = min(waiting, key=left)
        waiting.remove(least)
        order.append(least)
        done.add(least)
    return order
