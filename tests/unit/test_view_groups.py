# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which axes of a view belong together."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.contract.sizes import Size, evaluate_size, parse_shape
from retrograd.pipelines.analysis.layout.view_groups import AxisGroup, find_axis_groups, to_polynomial

JOINED: st.SearchStrategy[bool] = st.booleans()
HINTS = {"b": 6, "t": 7}


@pytest.mark.parametrize(
    ("source", "result", "expected"),
    [
        ("t, b, 2, 8", "b * t, 16", [((0, 1), (0,)), ((2, 3), (1,))]),
        ("b * t, 16", "t, b, 16", [((0,), (0, 1)), ((1,), (2,))]),
        ("t, b, 16", "t, 2 * b, 8", [((0,), (0,)), ((1, 2), (1, 2))]),
        ("b, 4", "b, 1, 4", [((0,), (0,)), ((1,), (1, 2))]),
        ("b, 1", "b", [((0, 1), (0,))]),
        # As many elements, and of no two lists of axes the same number for every size.
        ("b + t, 2", "2, b + t", [((0, 1), (0, 1))]),
        # 6 x 7 is 42 also where b is no factor.
        ("b, 7", "42 * b // 6", [((0, 1), (0,))]),
    ],
)
def test_groups(source: str, result: str, expected: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    found = find_axis_groups(parse_shape(source), parse_shape(result), HINTS)
    assert found == [AxisGroup(s, r) for s, r in expected]


def test_sizes_that_are_equal_by_chance_are_not_grouped() -> None:
    """With b = 6, a = 6 both pairings of axes have equal numbers; only one holds for all sizes."""
    found = find_axis_groups(("a", "b"), ("b", "a"), {"a": 6, "b": 6})
    assert found == [AxisGroup((0, 1), (0, 1))]


def test_polynomials_are_equal_where_expressions_are() -> None:
    (left, right) = parse_shape("(a + 2) * (a - 2), a * a - 4")
    assert to_polynomial(left) == to_polynomial(right) == {("a", "a"): 1, (): -4}
    (left, right) = parse_shape("2 * (a // 2), a")
    assert to_polynomial(left) != to_polynomial(right)


@given(st.lists(st.sampled_from(["b", "t", 2, 3, 4]), min_size=1, max_size=5), st.data())
def test_groups_partition_both_shapes_and_hold_for_other_sizes(axes: list[Size], data: st.DataObject) -> None:
    def regroup() -> list[Size]:
        shape: list[Size] = []
        for size in axes:
            if shape and bool(data.draw(JOINED)):
                shape[-1] = ("*", shape[-1], size)
            else:
                shape.append(size)
        return shape

    source, result = regroup(), regroup()
    groups = find_axis_groups(source, result, HINTS)
    assert [a for g in groups for a in g.source] == list(range(len(source)))
    assert [a for g in groups for a in g.result] == list(range(len(result)))
    for sizes in (HINTS, {"b": 1, "t": 1}, {"b": 5, "t": 11}):
        for group in groups:
            ours = prod([evaluate_size(source[a], sizes) for a in group.source])
            assert ours == prod([evaluate_size(result[a], sizes) for a in group.result])
