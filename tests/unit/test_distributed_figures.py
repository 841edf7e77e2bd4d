# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How `benchmarks/distributed.py` adds up the time of kernels."""

from __future__ import annotations

import pytest
from distributed import Interval, intersect, measure_length, unite


@pytest.mark.parametrize(
    ("given", "united"),
    [
        ([], []),
        ([(3, 4), (0, 1)], [(0, 1), (3, 4)]),
        ([(0, 2), (1, 3)], [(0, 3)]),
        ([(0, 5), (1, 2), (5, 6)], [(0, 6)]),
    ],
)
def test_times_of_kernels_that_meet_count_once(given: list[Interval], united: list[Interval]) -> None:
    assert unite(given) == united


def test_the_time_that_is_hidden() -> None:
    reductions, kernels = [(0, 4), (6, 10)], [(1, 2), (3, 7), (9, 12)]
    assert intersect(reductions, kernels) == intersect(kernels, reductions) == [(1, 2), (3, 4), (6, 7), (9, 10)]
    assert measure_length(intersect(reductions, kernels)) == 4
    assert intersect(reductions, []) == []
