# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is left of a backward without some of its tangents."""

import pytest
from graph_text import parse_graph, value_names

from retrograd.pipelines.analysis.partition.absent_tangents import ADDITIONS, AbsentValues, find_absent_values
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph

# Two outputs: the gradients of both are added up, and one of them has a gradient of its own.
TWO = """
    input x 64
    tangent t 64
    tangent u 64
    c = pointwise x 64
    a = pointwise u c 64
    b = mm t x 64
    s = add.Tensor a b 64
    k = compute u 64
    g = pointwise s c 64
    backward g k
"""


def number(graph: JointGraph, name: str) -> int:
    return next(value.id for value in graph.values if value.name == name)


def without(graph: JointGraph, *names: str, sums: bool = True) -> AbsentValues:
    carriers = [value.id for value in graph.values if value.is_tensor]
    plain = [op.id for op in graph.ops if op.name in ADDITIONS] if sums else []
    return find_absent_values(graph, [number(graph, name) for name in names], carriers, plain)


def test_everything_is_there_with_all_tangents() -> None:
    assert without(parse_graph(TWO)) == AbsentValues(frozenset(), {}, ())


def test_what_needs_absent_tangents_alone_is_absent_and_a_sum_is_its_other_term() -> None:
    graph = parse_graph(TWO)
    found = without(graph, "u")
    assert value_names(graph, sorted(found.values)) == ["u", "a", "k"]
    assert found.kept == {3: number(graph, "b")}
    assert found.zeros == ()
    found = without(graph, "t")
    assert value_names(graph, sorted(found.values)) == ["t", "b"]
    assert found.kept == {3: number(graph, "a")}


def test_nothing_is_left_without_tangents() -> None:
    graph = parse_graph(TWO)
    found = without(graph, "t", "u")
    # What no tangent flows into is there all the same.
    assert value_names(graph, sorted(set(range(len(graph.values))) - found.values)) == ["x", "c"]
    assert found.kept == {}


def test_a_sum_that_is_not_plain_takes_zeros() -> None:
    found = without(parse_graph(TWO), "u", sums=False)
    assert (found.kept, found.zeros) == ({}, ((3, 0),))


@pytest.mark.parametrize("kind", ["cat", "pointwise", "mm", "scatter_add", "opaque"])
def test_other_ops_of_both_take_zeros(kind: str) -> None:
    graph = parse_graph(f"""
        tangent t 64
        tangent u 64
        n = pointwise u 64
        g = {kind} t n n 64
        backward g
    """)
    found = without(graph, "u")
    assert found.zeros == ((1, 1), (1, 2))
    assert number(graph, "g") not in found.values


@pytest.mark.parametrize("kind", ["pointwise", "random", "opaque"])
def test_eager_runs_no_op_at_all_of_absent_tangents(kind: str) -> None:
    graph = parse_graph(f"""
        input x 64
        tangent t 64
        tangent u 64
        n = {kind} u x 64
        g = pointwise t 64
        backward g n
    """)
    assert number(graph, "n") in without(graph, "u").values


def test_a_size_of_a_tangent_is_no_gradient() -> None:
    graph = parse_graph("""
        input x 64
        tangent t 64
        tangent u 64
        size = view u -
        g = view x size 64
        h = pointwise g t 64
        backward h
    """)
    found = without(graph, "u")
    assert found.values == {number(graph, "u")}
    assert found.zeros == ((0, 0),)
    assert found.kept == {}


def test_both_results_of_an_op_that_takes_one_that_is_there_are_there() -> None:
    graph = parse_graph("""
        tangent t 64
        tangent u 64
        a b = compute t u 64 64
        backward a b
    """)
    found = without(graph, "u")
    assert found.values == {1}
    assert found.zeros == ((0, 1),)


def test_a_chain_of_sums_ends_at_what_is_there() -> None:
    graph = parse_graph("""
        tangent t 64
        tangent u 64
        tangent v 64
        a = add.Tensor u t 64
        b = add.Tensor a v 64
        c = add.Tensor u v 64
        d = add.Tensor b c 64
        backward d
    """)
    found = without(graph, "u", "v")
    assert found.kept == {0: 0, 1: number(graph, "a"), 3: number(graph, "b")}
    assert number(graph, "c") in found.values


def test_every_addition_says_why() -> None:
    assert all(addition.reason and addition.keeps for addition in ADDITIONS.values())
