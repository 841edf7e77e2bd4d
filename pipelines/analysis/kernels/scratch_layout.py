# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where in one block of memory buffers lie that are alive at different times.

Dynamic storage allocation with all lifetimes known: the least block is NP-hard to find (Garey and Johnson, problem
SR2), and best fit in a good order comes close. Four orders are tried: as the buffers are made, by size, by size times
lifetime, and by lifetime, longest first; the order in which they are made is the only one that IREE takes.

Of what is no larger than the least block found, that is taken in which memory is free for longer before and after each
use: what shares no memory can run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

# By how many steps lifetimes are stretched, and up to what part of the block they may fill it; the first that fits is
# taken.
_STRETCHES = (64, 32, 16, 8, 4, 2, 1)
_FILLS = (1.0, 0.94, 0.85, 0.7)
# Stretching is for blocks of no more buffers than these: the time that a layout takes is quadratic in their number.
_MOST_STRETCHED = 1500


@dataclass(frozen=True)
class Slice:
    """A buffer of ``size`` bytes, a multiple of the alignment, alive from step ``first`` to step ``last``."""

    first: int
    last: int
    size: int


@dataclass(frozen=True)
class Layout:
    """The bytes of the block, and the offset of each slice in it."""

    size: int
    offsets: tuple[int, ...]


def lay_out(slices: Sequence[Slice], *, loose: bool = True) -> Layout:
    """A small block for ``slices``, no two of which share memory while both are alive; ``loose`` has memory free for
    as long as it can be before and after each use, in a block of the same size.

    Raises:
        ValueError: a slice ends before it begins, or has a negative size.
    """
    check_slices(slices)
    return _lay_out(tuple(slices), loose)


def check_slices(slices: Sequence[Slice]) -> None:
    """Raise ``ValueError`` for a slice that ends before it begins, or has a negative size."""
    for place, part in enumerate(slices):
        if part.last < part.first or part.size < 0:
            raise ValueError(f"slice {place} of {part.size} bytes is alive from step {part.first} to {part.last}")


@cache
def _lay_out(slices: tuple[Slice, ...], loose: bool) -> Layout:
    tight = _pack(slices, peak_of(slices))
    if not loose or len(slices) > _MOST_STRETCHED:
        return tight
    for stretched in _stretches(slices, tight.size):
        layout = _pack(stretched, tight.size)
        if layout.size <= tight.size:
            # Where it is smaller: budgets are kept by the size that a tight layout has.
            return Layout(tight.size, layout.offsets)
    return tight


def _pack(slices: Sequence[Slice], enough: int) -> Layout:
    """The smallest block that an order leads to, or the first of no more than ``enough`` bytes."""
    best: Layout | None = None
    for order in _orders(slices):
        layout = _fit(slices, order)
        best = layout if best is None or layout.size < best.size else best
        if best.size <= enough:
            break
    return best or Layout(0, ())


def peak_of(slices: Sequence[Slice]) -> int:
    """The most bytes that are alive at one step: no layout has less."""
    return int(live_bytes(slices).max(initial=0))


def live_bytes(slices: Sequence[Slice]) -> np.ndarray:
    """Bytes alive at each step."""
    changes = np.zeros(max((part.last for part in slices), default=-1) + 2, np.int64)
    for part in slices:
        changes[part.first] += part.size
        changes[part.last + 1] -= part.size
    return np.cumsum(changes)[:-1]


def _orders(slices: Sequence[Slice]) -> Iterator[list[int]]:
    """The orders to place slices in."""
    places = range(len(slices))
    yield list(places)
    yield sorted(places, key=lambda i: (-slices[i].size, slices[i].first))
    yield sorted(places, key=lambda i: -slices[i].size * (slices[i].last - slices[i].first + 1))
    yield sorted(places, key=lambda i: slices[i].first - slices[i].last)


def _fit(slices: Sequence[Slice], order: Sequence[int]) -> Layout:
    """Place each slice in the smallest gap that holds it, between those that are placed and alive with it, or behind
    them."""
    starts, stops, firsts, lasts = np.zeros((4, len(slices)), np.int64)
    for count, place in enumerate(order):
        part = slices[place]
        rivals = (firsts[:count] <= part.last) & (lasts[:count] >= part.first)
        by_start = np.argsort(starts[:count][rivals], kind="stable")
        begins = starts[:count][rivals][by_start]
        frees = np.concatenate([[0], np.maximum.accumulate(stops[:count][rivals][by_start])])
        gaps = begins - frees[:-1]
        fitting = np.nonzero(gaps >= part.size)[0]
        start = frees[fitting[np.argmin(gaps[fitting])]] if len(fitting) else frees[-1]
        starts[count], stops[count], firsts[count], lasts[count] = start, start + part.size, part.first, part.last
    offsets = np.zeros(len(slices), np.int64)
    offsets[list(order)] = starts
    return Layout(int(stops.max(initial=0)), tuple(map(int, offsets)))


def _stretches(slices: Sequence[Slice], size: int) -> Iterator[list[Slice]]:
    """``slices`` with longer lifetimes, the longest first, that fill less and less of a block of ``size`` bytes."""
    live = live_bytes(slices)
    smallest_first = sorted(range(len(slices)), key=lambda i: slices[i].size)
    for steps in _STRETCHES:
        for fill in _FILLS:
            yield _stretch(slices, smallest_first, live.copy(), steps, int(size * fill))


def _stretch(slices: Sequence[Slice], order: Sequence[int], live: np.ndarray, steps: int, most: int) -> list[Slice]:
    """Lengthen each lifetime by up to ``steps`` at both ends, in this order, as long as no more than ``most`` bytes are
    alive where it is lengthened; ``live`` are those that are at each step, and is kept up."""
    longer = list(slices)
    for place in order:
        part = slices[place]
        behind = _room(live[part.last + 1 : part.last + 1 + steps], most - part.size)
        ahead = _room(live[max(0, part.first - steps) : part.first][::-1], most - part.size)
        live[part.last + 1 : part.last + 1 + behind] += part.size
        live[part.first - ahead : part.first] += part.size
        longer[place] = Slice(part.first - ahead, part.last + behind, part.size)
    return longer


def _room(live: np.ndarray, most: int) -> int:
    """How many of ``live`` come before the first above ``most``."""
    above = np.nonzero(live > most)[0]
    return int(above[0]) if len(above) else len(live)
