# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Comparisons of a value with what was chosen of it: what a plan has to save so that both halves answer them alike."""

from dataclasses import replace

import pytest
from graph_text import parse_graph, value_names

from retrograd.pipelines.analysis.partition.decisions import find_decisions, find_torn
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.min_cut import find_min_cut_partition
from retrograd.pipelines.analysis.partition.partition_plan import find_default_partition, plan_from_saved

MAXIMUM = """
    input x 64
    tangent t 4
    h = pointwise x 64
    m = amax h 4
    wide = view m 4
    mask = eq.Tensor h wide 16
    g = pointwise t mask 64
    forward m
    backward g
"""
GRAPH = parse_graph(MAXIMUM)


def saved_beside(graph: JointGraph, names: str) -> list[str]:
    """What is saved of `names` and for the decisions."""
    values = [v.id for v in graph.values if v.name in names.split()]
    return value_names(graph, plan_from_saved(graph, values, "test").saved)


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        # Of a maximum that is saved, no element equals it that is computed again: the answer is saved instead.
        ("m", ["mask"]),
        ("wide", ["mask"]),
        ("h", ["h"]),
        ("h m", ["h", "m"]),
        # Both are computed again, alike.
        ("", []),
        ("mask", ["mask"]),
    ],
)
def test_the_answer_is_saved_where_one_side_is_computed_again(saved: str, expected: list[str]) -> None:
    assert saved_beside(GRAPH, saved) == expected


def test_every_policy_saves_it() -> None:
    assert value_names(GRAPH, find_min_cut_partition(GRAPH).saved) == ["mask"]
    assert value_names(GRAPH, find_default_partition(GRAPH).saved) == ["h", "m"]


def test_a_mark_that_asks_for_recomputation_does_not_tear_it() -> None:
    graph = parse_graph(MAXIMUM.replace("eq.Tensor", "eq.Tensor@must").replace("= pointwise x", "= pointwise@must x"))
    assert saved_beside(graph, "m") == ["mask"]


def test_what_is_saved_in_a_narrower_type_is_another_value() -> None:
    (h,) = (v.id for v in GRAPH.values if v.name == "h")
    values = tuple(replace(v, stored=32) if v.id == h else v for v in GRAPH.values)
    assert saved_beside(replace(GRAPH, values=values), "h m") == ["mask"]


def test_values_that_have_nothing_in_common_are_compared_as_they_come() -> None:
    assert find_decisions(parse_graph(MAXIMUM.replace("amax h", "pointwise h"))) == ()


def test_what_is_chosen_of_an_argument_is_the_same_in_both_halves() -> None:
    assert find_decisions(parse_graph(MAXIMUM.replace("pointwise x", "view x"))) == ()


def test_the_sign_of_a_difference_is_a_comparison() -> None:
    graph = parse_graph("""
        input x 64
        tangent t 64
        h = pointwise x 64
        m = amax h 4
        d = sub.Tensor h m 64
        mask = gt.Scalar d 16
        g = pointwise t mask 64
        forward m d
        backward g
    """)
    assert saved_beside(graph, "m") == ["mask"]


def test_a_comparison_that_takes_a_gradient_finds_its_difference_saved() -> None:
    graph = parse_graph("""
        input x 64
        tangent t 64
        h = pointwise x 64
        m = amax h 4
        d = sub.Tensor h m 64
        y = abs d 64
        g = threshold_backward t y 64
        forward m y
        backward g
    """)
    assert saved_beside(graph, "m") == ["y"]


def test_what_is_computed_alike_twice_is_one_value() -> None:
    graph = parse_graph("""
        input x 64
        tangent t 64
        h = pointwise x 64
        m = amax h 4
        again = pointwise x 64
        mask = eq.Tensor again m 16
        g = pointwise t mask 64
        forward m
        backward g
    """)
    assert find_decisions(graph) == ()
    same = replace(graph, same={2: 0, 0: 0})
    assert saved_beside(same, "m") == ["mask"]


def test_nothing_is_torn_by_a_backward_that_computes_nothing_again() -> None:
    h, m = (next(v.id for v in GRAPH.values if v.name == name) for name in "hm")
    assert find_torn(GRAPH, (h, m), GRAPH.tangent_ops) == frozenset()
