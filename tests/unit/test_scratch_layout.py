# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Layouts of scratch memory: nothing shares memory while it is alive, and blocks are small."""

import random
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.pipelines.analysis.kernels.scratch_layout import Layout, Slice, lay_out, peak_of

SLICES = st.builds(
    lambda first, length, size: Slice(first, first + length, 64 * size),
    st.integers(0, 12),
    st.integers(0, 6),
    st.integers(0, 9),
)


def overlaps(slices: list[Slice], layout: Layout) -> list[tuple[int, int]]:
    """The slices that share a byte at one time."""
    return [
        (i, j)
        for (i, a), (j, b) in combinations(enumerate(slices), 2)
        if a.first <= b.last
        and b.first <= a.last
        and layout.offsets[i] < layout.offsets[j] + b.size
        and layout.offsets[j] < layout.offsets[i] + a.size
    ]


def least_block(slices: list[Slice]) -> int:
    """The least block, with each slice as low as it can lie: in some order that is the best layout."""

    def place(order: tuple[int, ...]) -> int:
        placed: list[tuple[int, Slice]] = []
        for i in order:
            rivals = [(o, s) for o, s in placed if s.first <= slices[i].last and slices[i].first <= s.last]
            starts = sorted([0, *(o + s.size for o, s in rivals)])
            low = next(x for x in starts if all(x + slices[i].size <= o or o + s.size <= x for o, s in rivals))
            placed.append((low, slices[i]))
        return max((o + s.size for o, s in placed), default=0)

    return min(map(place, permutations(range(len(slices)))))


@pytest.mark.parametrize("loose", [False, True])
@given(slices=st.lists(SLICES, max_size=24))
def test_what_is_alive_together_lies_apart(loose: bool, slices: list[Slice]) -> None:
    layout = lay_out(slices, loose=loose)
    assert overlaps(slices, layout) == []
    assert layout.size >= peak_of(slices)
    assert layout.size >= max((o + s.size for o, s in zip(layout.offsets, slices, strict=True)), default=0)


@given(slices=st.lists(SLICES, max_size=24))
def test_a_loose_layout_takes_as_much(slices: list[Slice]) -> None:
    """Budgets are kept by the one, and what runs has the other."""
    assert lay_out(slices).size == lay_out(slices, loose=False).size


@pytest.mark.long
def test_small_blocks_are_near_the_least() -> None:
    """Of a few buffers best fit in four orders finds the least block nearly always."""
    numbers = random.Random(0)
    ratios = []
    for _ in range(200):
        firsts = [numbers.randrange(8) for _ in range(6)]
        slices = [Slice(first, first + numbers.randrange(4), 64 * numbers.randint(1, 9)) for first in firsts]
        ratios.append(lay_out(slices, loose=False).size / least_block(slices))
    assert min(ratios) == 1
    assert sum(ratio == 1 for ratio in ratios) >= 190
    assert max(ratios) < 1.2


def test_the_order_of_making_leaves_a_gap() -> None:
    slices = [Slice(0, 1, 256), Slice(0, 3, 256), Slice(2, 3, 512)]
    assert lay_out(slices, loose=False) == Layout(768, (0, 512, 0))


def test_loose_keeps_what_is_freed_from_what_comes_next() -> None:
    """Beside one large buffer there is room for all three small ones: none takes another's place."""
    slices = [Slice(0, 0, 64), Slice(1, 1, 64), Slice(2, 2, 64), Slice(8, 9, 640)]
    assert len(set(lay_out(slices).offsets[:3])) == 3
    assert lay_out(slices).size == 640
    assert len(set(lay_out(slices, loose=False).offsets[:3])) == 1


def test_nothing_takes_nothing() -> None:
    assert lay_out([]) == Layout(0, ())
    assert peak_of([]) == 0


@pytest.mark.parametrize("part", [Slice(3, 1, 64), Slice(0, 1, -64)])
def test_no_lifetime(part: Slice) -> None:
    with pytest.raises(ValueError, match=r"slice 1 of -?64 bytes is alive from step \d to 1"):
        lay_out([Slice(0, 0, 64), part])
