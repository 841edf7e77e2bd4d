# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Maps between elements: composed, inverted, and those of views beside numpy's reshape."""

from itertools import product

import numpy as np
import pytest

from retrograd.pipelines.analysis.layout.element_maps import (
    ONLY,
    Computed,
    ElementMap,
    collapse,
    compose,
    drop_unit_axes,
    expand,
    invert,
)


def test_a_transpose_of_a_transpose_reads_in_order() -> None:
    assert compose((1, 0), (1, 0)) == (0, 1)
    assert compose((2, 0, 1), (1, 2, 0)) == (0, 1, 2)


def test_composing_reaches_into_computed_places() -> None:
    inner = (Computed("join[2, 3]", (0, 1)), 1)
    assert compose(inner, (1, 0)) == (Computed("join[2, 3]", (1, 0)), 0)
    assert compose(inner, (0, ONLY)) == (Computed("join[2, 3]", (0, ONLY)), ONLY)
    assert compose(inner, (0, 1)) == inner


def test_an_inverse_has_each_loop_at_the_axis_that_it_writes() -> None:
    assert invert((1, 0), 2) == (1, 0)
    assert invert((2, 0, 1), 3) == (1, 2, 0)
    assert invert((0,), 2) is None
    assert invert((0, Computed("d0 + d1", (0, 1))), 2) is None


def test_axes_of_size_one_have_one_place() -> None:
    assert drop_unit_axes((1, 0), (1, 4)) == (ONLY, 0)


def element(map_: ElementMap, place: tuple[int, ...]) -> tuple[int | None, ...]:
    """The place that ``map_`` reads for ``place``; ``None`` where it is computed from several axes."""
    return tuple(place[term] if isinstance(term, int) else 0 if term == ONLY else None for term in map_)


@pytest.mark.parametrize(
    ("groups", "source", "result"),
    [
        ([[0, 1], [2]], (3, 4), (3, 1, 4)),
        ([[0, 1], [2]], (3, 4), (1, 3, 4)),
        ([[0], [1, 2, 3]], (3, 4), (3, 1, 4, 1)),
        ([[0, 1]], (1,), (1, 1)),
    ],
)
def test_views_that_add_axes_of_size_one_beside_numpy(
    groups: list[list[int]], source: tuple[int, ...], result: tuple[int, ...]
) -> None:
    values = np.arange(np.prod(source)).reshape(source)
    seen = values.reshape(result)
    for place in product(*map(range, result)):
        assert seen[place] == values[element(expand(groups, result), place)]
    for place in product(*map(range, source)):
        assert values[place] == seen[element(collapse(groups, result), place)]


def test_axes_that_are_joined_or_parted_are_told_by_all_of_their_sizes() -> None:
    joined = expand([[0, 1], [2]], (3, 4, 5))
    assert joined == (Computed("join[3, 4]", (0, 1)), 2)
    assert joined != expand([[0, 1], [2]], (4, 3, 5))
    parts = collapse([[0, 1], [2]], (3, 4, 5))
    assert parts == (Computed("part0[3, 4]", (0,)), Computed("part1[3, 4]", (0,)), 1)
