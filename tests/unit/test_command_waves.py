# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Waves of commands: what touches the same bytes keeps its order, and there are as few waves as can be."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.pipelines.analysis.kernels.command_waves import END, Access, find_waves

ACCESSES = st.builds(
    lambda resource, start, size, writes: Access(resource, start, start + size, writes),
    st.integers(0, 1),
    st.integers(0, 12),
    st.integers(1, 6),
    st.booleans(),
)
COMMANDS = st.lists(st.one_of(st.lists(ACCESSES, max_size=3), st.none()), max_size=14)


def depend(first: list[Access] | None, second: list[Access] | None) -> bool:
    if first is None or second is None:
        return True
    return any(
        a.resource == b.resource and a.start < b.stop and b.start < a.stop and (a.writes or b.writes)
        for a in first
        for b in second
    )


@given(commands=COMMANDS)
def test_each_command_is_right_behind_the_last_that_it_depends_on(commands: list[list[Access] | None]) -> None:
    waves = find_waves(commands)
    for i, command in enumerate(commands):
        before = [waves[j] for j in range(i) if depend(commands[j], command)]
        assert waves[i] == max(before, default=-1) + 1


@given(commands=COMMANDS)
def test_what_depends_on_one_another_keeps_its_order(commands: list[list[Access] | None]) -> None:
    waves = find_waves(commands)
    for (i, first), (j, second) in combinations(enumerate(commands), 2):
        assert waves[i] < waves[j] or not depend(first, second)


@pytest.mark.parametrize(
    ("first", "second", "waves"),
    [
        (Access(0, 0, 8, True), Access(0, 0, 8, False), [0, 1]),
        (Access(0, 0, 8, False), Access(0, 4, 12, True), [0, 1]),
        (Access(0, 0, 8, True), Access(0, 7, 12, True), [0, 1]),
        (Access(0, 0, 8, False), Access(0, 0, 8, False), [0, 0]),
        (Access(0, 0, 8, True), Access(0, 8, 12, True), [0, 0]),
        (Access(0, 0, 8, True), Access(1, 0, 8, True), [0, 0]),
        # An end that is not known.
        (Access(0, 64, 128, False), Access(0, 0, END, True), [0, 1]),
    ],
)
def test_two_commands(first: Access, second: Access, waves: list[int]) -> None:
    assert find_waves([[first], [second]]) == waves


def test_a_command_that_is_not_known_runs_by_itself() -> None:
    apart = [[Access(0, i, i + 1, True)] for i in range(4)]
    assert find_waves([apart[0], apart[1], None, apart[2], apart[3]]) == [0, 0, 1, 2, 2]
    assert find_waves([None, None]) == [0, 1]
    assert find_waves([]) == []
