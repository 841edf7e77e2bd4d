# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Groups of commands are parted where that lowers the peak, and not else."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.pipelines.analysis.kernels.group_order import Memory, find_live, part_groups

STEPS = st.lists(st.integers(1, 6), min_size=1, max_size=6)
PARTS = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9), st.booleans(), st.booleans())


def _number(sizes: list[int]) -> list[list[int]]:
    ends = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    return [[*range(first, end)] for first, end in pairwise(ends)]


@settings(deadline=None)
@given(STEPS, st.lists(PARTS, max_size=12))
def test_all_run_once_in_order_and_no_step_is_fuller(
    sizes: list[int], parts: list[tuple[int, int, int, bool, bool]]
) -> None:
    steps, count = _number(sizes), sum(sizes)
    memory = [Memory(size, frozenset({a % count, b % count}), *how) for a, b, size, *how in parts]
    found = part_groups(steps, memory)
    places = {command: place for place, step in enumerate(steps) for command in step}
    order = [places[command] for step in found for command in step]
    assert order == sorted(order)
    assert sorted(command for step in found for command in step) == [*range(count)]
    assert all(len({places[command] for command in step}) == 1 for step in found)
    assert int(find_live(found, memory).max()) <= int(find_live(steps, memory).max())


def test_what_ends_a_life_runs_before_what_begins_one() -> None:
    steps = [[0], [1, 2], [3]]
    memory = [Memory(8, frozenset({0, 2})), Memory(8, frozenset({1, 3}))]
    assert part_groups(steps, memory) == [[0], [2], [1], [3]]
    # Nothing is won where both are there before.
    given_up = [Memory(8, frozenset({2}), is_given=True), Memory(8, frozenset({1, 3}), is_given=True)]
    assert part_groups(steps, given_up) == steps
    # Or after.
    kept = [Memory(8, frozenset({2}), is_kept=True), Memory(8, frozenset({1}), is_kept=True)]
    assert part_groups(steps, kept) == steps


def test_what_takes_little_stays_beside_another() -> None:
    memory = [Memory(8, frozenset({0, 2})), Memory(8, frozenset({1, 4})), Memory(1, frozenset({3, 4}))]
    parted = part_groups([[0], [1, 2, 3], [4]], memory)
    assert [len(step) for step in parted] == [1, 1, 2, 1]
    assert int(find_live(parted, memory).max()) == 9


def test_layers_that_are_alike_are_all_parted() -> None:
    memory = [Memory(8, frozenset(pair)) for pair in ((0, 2), (1, 3), (4, 6), (5, 7))]
    steps = [[0], [1, 2], [3], [4], [5, 6], [7]]
    assert part_groups(steps, memory) == [[0], [2], [1], [3], [4], [6], [5], [7]]


def test_of_large_groups_one_order_is_tried() -> None:
    """Each of ten reads one buffer for the last time and writes another; what frees most runs first."""
    memory = [Memory(10 + n, frozenset({n, 10 + n})) for n in range(10)]
    memory += [Memory(10, frozenset({10 + n, 20})) for n in range(10)]
    found = part_groups([[*range(10)], [*range(10, 20)], [20]], memory)
    assert [len(step) for step in found[:1]] == [10]
    assert found[1] == [19]
    assert int(find_live(found, memory).max()) < int(find_live([[*range(10)], [*range(10, 20)], [20]], memory).max())
