# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Partition plans: what a choice of saved values means for both halves, and the choice that eager autograd makes."""

import pytest
from graph_text import op_names, parse_graph, value_names

from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.partition_plan import (
    PartitionPlan,
    find_default_partition,
    find_unsavable,
    plan_from_saved,
)

CHAIN = parse_graph("""
    input x 64
    tangent t 64
    c = constant -
    a = !pointwise x c 64
    v = view a 64
    b = !pointwise v c 32
    ga = pointwise t b 64
    gx = pointwise ga v c 64
    forward b
    backward gx
""")


def plan(graph: JointGraph, names: str) -> PartitionPlan:
    return plan_from_saved(graph, [v.id for v in graph.values if v.name in names.split()], "test")


def saved(graph: JointGraph, found: PartitionPlan) -> list[str]:
    return value_names(graph, found.saved)


def test_what_is_not_saved_runs_again() -> None:
    found = plan(CHAIN, "")
    assert found.saved == ()
    assert op_names(CHAIN, found.forward) == ["c", "a", "v", "b"]
    assert op_names(CHAIN, found.backward) == ["c", "a", "v", "b", "ga", "gx"]
    # Constants and views come along, and are no work.
    assert op_names(CHAIN, found.recomputed) == ["a", "b"]
    assert (found.saved_bytes, found.recomputed_flops) == (0, 200)


def test_what_is_saved_does_not() -> None:
    found = plan(CHAIN, "a b")
    assert saved(CHAIN, found) == ["a", "b"]
    assert op_names(CHAIN, found.backward) == ["c", "v", "ga", "gx"]
    assert (found.recomputed, found.saved_bytes, found.recomputed_flops) == ((), 96, 0)


def test_what_the_backward_does_not_use_is_not_saved() -> None:
    assert saved(CHAIN, plan(CHAIN, "a v b")) == ["v", "b"]


def test_arguments_and_values_of_the_backward_are_not_saved() -> None:
    assert saved(CHAIN, plan(CHAIN, "x t ga gx")) == []


def test_what_the_step_overwrites_is_saved_wherever_the_backward_uses_it() -> None:
    text = (
        "mutated m 8\n mutated n 4\n tangent t 8\n y = pointwise m n 8\n g = pointwise t m 8\n forward y\n backward g"
    )
    graph = parse_graph(text)
    for found in (plan(graph, ""), find_default_partition(graph)):
        assert saved(graph, found) == ["m"]
        assert found.saved_bytes == 8


def test_the_forward_computes_what_only_the_backward_needs_if_it_is_saved() -> None:
    text = """
        input x 64
        tangent t 64
        y = pointwise x 64
        mask = pointwise y 16
        g = pointwise t mask 64
        forward y
        backward g
    """
    graph = parse_graph(text)
    assert op_names(graph, plan(graph, "mask").forward) == ["y", "mask"]
    assert op_names(graph, plan(graph, "mask").backward) == ["g"]
    assert op_names(graph, plan(graph, "y").forward) == ["y"]
    assert op_names(graph, plan(graph, "y").backward) == ["mask", "g"]
    # Eager saves what the forward computed: the mask is computed by the backward.
    assert saved(graph, find_default_partition(graph)) == ["y"]


def test_a_gradient_that_the_forward_computed_can_be_saved() -> None:
    graph = parse_graph("input x 64\n y = compute x 64\n forward y\n backward y x")
    found = find_default_partition(graph)
    assert saved(graph, found) == ["y"]
    assert (found.backward, found.recomputed) == ((), ())


def test_default_saves_what_views_look_at() -> None:
    found = find_default_partition(CHAIN)
    assert saved(CHAIN, found) == ["a", "b"]
    assert found.policy == "default"


def test_default_saves_neither_arguments_nor_their_views() -> None:
    text = "input w 64\n tangent t 64\n v = view w 64\n y = compute v 64\n g = compute t v 64\n forward y\n backward g"
    graph = parse_graph(text)
    found = find_default_partition(graph)
    assert found.saved == ()
    assert op_names(graph, found.backward) == ["v", "g"]


def test_default_looks_through_lists() -> None:
    text = """
        input x 64
        tangent t 64
        y = compute x 64
        list = constant y -
        z = data-movement list 64
        g = pointwise t list 64
        forward z
        backward g
    """
    graph = parse_graph(text)
    assert saved(graph, find_default_partition(graph)) == ["y"]


@pytest.mark.parametrize("kind", ["opaque", "random"])
def test_an_op_that_must_not_run_twice_and_cannot_be_saved_is_found(kind: str) -> None:
    text = f"""
        input x 64
        tangent t 64
        n = {kind} x -
        y = pointwise x n 64
        g = pointwise t n 64
        forward y
        backward g
    """
    graph = parse_graph(text)
    assert find_unsavable(graph, plan(graph, "")) == 0
    assert find_unsavable(graph, plan(graph, "n")) == 0


def test_plans_that_can_be_carried_out_have_nothing_unsavable() -> None:
    assert find_unsavable(CHAIN, plan(CHAIN, "")) is None
    assert find_unsavable(CHAIN, plan(CHAIN, "a b")) is None
    # Run by the backward alone, it runs once.
    graph = parse_graph(
        "input x 8\n tangent t 8\n y = pointwise x 8\n n = opaque x -\n g = pointwise t n 8\n forward y\n backward g"
    )
    assert find_unsavable(graph, plan(graph, "")) is None
