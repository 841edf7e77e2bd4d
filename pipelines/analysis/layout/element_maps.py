# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which element of one tensor is read for an element of another, as data: terms over the axes of the reader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Computed:
    """A place that is worked out from others in a way that only ``rule`` says; two of the same rule and places agree.
    ``rule`` is any text that tells the arithmetic; a place that is the same for all elements has no ``places``."""

    rule: str
    places: tuple[int | Computed, ...] = ()


ONLY = Computed("0")
"""The one place along an axis of size 1."""

# For each axis of what is read, the place in terms of the reader's axes.
ElementMap = tuple[int | Computed, ...]


def compose(inner: ElementMap, outer: Sequence[int | Computed]) -> ElementMap:
    """The map of a reader of a reader: ``inner`` tells what the middle one reads in terms of its own axes, ``outer``
    gives these in terms of the last one's."""
    return tuple(_substitute(term, outer) for term in inner)


def _substitute(term: int | Computed, outer: Sequence[int | Computed]) -> int | Computed:
    if isinstance(term, int):
        return outer[term]
    return Computed(term.rule, tuple(_substitute(place, outer) for place in term.places))


def invert(map_: ElementMap, loops: int) -> ElementMap | None:
    """The loops of an op in terms of the axes of its result, whose element it writes by ``map_``; ``None`` where a loop
    is no axis by itself."""
    axes = {term: axis for axis, term in enumerate(map_) if isinstance(term, int)}
    return tuple(axes[loop] for loop in range(loops)) if len(axes) == loops else None


def expand(groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> ElementMap:
    """Map elements of ``tensor.expand_shape`` to those that it reads: the axes of each group come from one axis,
    ``sizes`` are the result's.

    Axes of size 1 count for nothing; several others give a place by all of their numbers.
    """
    terms = list[int | Computed]()
    for group in groups:
        long = [axis for axis in group if sizes[axis] != 1]
        rule = f"join{[sizes[axis] for axis in long]}"
        terms.append(long[0] if len(long) == 1 else Computed(rule, tuple(long)) if long else ONLY)
    return tuple(terms)


def collapse(groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> ElementMap:
    """Map elements of ``tensor.collapse_shape`` to those that it reads: each group of axes becomes one, ``sizes`` are
    those of what is read."""
    terms = dict[int, int | Computed]()
    for axis, group in enumerate(groups):
        long = [inner for inner in group if sizes[inner] != 1]
        for place, inner in enumerate(long):
            rule = f"part{place}{[sizes[other] for other in long]}"
            terms[inner] = axis if len(long) == 1 else Computed(rule, (axis,))
    return tuple(terms.get(inner, ONLY) for inner in range(len(sizes)))


def drop_unit_axes(map_: Iterable[int | Computed], sizes: Sequence[int]) -> ElementMap:
    """``map_`` with the only place there is along axes of size 1 of what is read."""
    return tuple(ONLY if size == 1 else term for term, size in zip(map_, sizes, strict=True))
