# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Peaks of small plans, counted by hand; sizes are multiples of the alignment."""

import pytest
from graph_text import parse_graph

from retrograd.pipelines.analysis.fusion import Step, find_steps
from retrograd.pipelines.analysis.graph import JointGraph
from retrograd.pipelines.analysis.liveness import Peak, compute_peak, find_waves
from retrograd.pipelines.analysis.memory_size import parse_memory_size, resolve_memory_size
from retrograd.pipelines.analysis.partition_plan import plan_from_saved


def peak(text: str, saved: str = "") -> Peak:
    graph = parse_graph(text)
    return compute_peak(graph, plan_from_saved(graph, numbers(graph, saved), "test"))


def numbers(graph: JointGraph, names: str) -> list[int]:
    return [v.id for v in graph.values if v.name in names.split()]


CHAIN = """
    input x 128
    tangent t 128
    a = compute x 640
    b = compute a 1280
    y = reduction b 128
    ga = compute t b 640
    gx = compute ga 128
    forward y
    backward gx
"""


def test_scratch_lives_from_its_op_to_its_last_use() -> None:
    # Forward: a beside b. Backward: a and b again, then ga.
    assert peak(CHAIN) == Peak(128, 640 + 1280, 256, 640 + 1280)


def test_what_is_saved_lives_through_the_backward() -> None:
    # b is in storage of its own from the start of the forward to the end of the backward.
    assert peak(CHAIN, "b") == Peak(128 + 1280, 640, 256 + 1280, 640)
    assert peak(CHAIN, "b").bytes == 256 + 1280 + 640


def test_a_pointwise_op_with_one_user_takes_no_memory() -> None:
    text = "input x 64\n a = {0} x 6400\n y = reduction a 64\n forward y\n backward x"
    assert peak(text.format("pointwise")).forward_scratch == 0
    assert peak(text.format("compute")).forward_scratch == 6400


def test_a_pointwise_op_with_two_users_does() -> None:
    text = "input x 64\n a = pointwise x 640\n y = reduction a 64\n z = reduction a 64\n forward y z\n backward x"
    assert peak(text).forward_scratch == 640


def test_views_and_lists_keep_what_they_look_at_alive() -> None:
    text = """
        input x 64
        a = compute x 640
        v = view a 640
        l = constant v -
        b = compute x 1280
        y = data-movement l b 64
        forward y
        backward x
    """
    assert peak(text).forward_scratch == 640 + 1280


def test_small_buffers_are_aligned() -> None:
    assert peak("input x 4\n a = compute x 4\n y = compute a 4\n forward y\n backward x").forward_scratch == 64


def test_fused_ops_keep_their_operands_alive() -> None:
    text = """
        input x 64
        a = compute x 640
        p = pointwise a 640
        b = compute x 1280
        c = compute b 64
        y = pointwise p c 64
        forward y
        backward x
    """
    graph = parse_graph(text)
    formed = find_steps(graph, tuple(range(5)), numbers(graph, "x"), numbers(graph, "y"))
    assert [set(s.reads) for s in formed.steps][-1] == set(numbers(graph, "a c"))
    # a is read by y only, so that it is there beside b.
    assert peak(text).forward_scratch >= 640 + 1280


def test_neighbours_that_do_not_depend_on_one_another_run_at_once() -> None:
    steps = (Step((), (1,)), Step((), (2,)), Step((1,), (3,)), Step((3,), (4,)))
    assert find_waves(steps) == [0, 1, 1, 2]
    assert find_waves(()) == []


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (5, 5),
        ("7", 7),
        ("64MiB", 64 * 2**20),
        ("1.5 kib", 1536),
        ("2GB", 2 * 10**9),
        ("12B", 12),
        (0.5, 0.5),
        ("0.5", 0.5),
        ("1.0", 1.0),
    ],
)
def test_sizes(size: object, expected: float) -> None:
    found = parse_memory_size(size)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("size", [0, -1, 0.0, -0.5, float("nan"), float("inf"), "0", "-3", "0.0", "0MiB"])
def test_sizes_that_are_not_above_zero(size: object) -> None:
    with pytest.raises(ValueError, match="is not above zero; give bytes"):
        parse_memory_size(size)


@pytest.mark.parametrize("size", [True, None, "", "much", "64 MiB of it", "1e3", "MiB", [1]])
def test_sizes_that_are_unreadable(size: object) -> None:
    with pytest.raises(ValueError, match="unreadable memory budget"):
        parse_memory_size(size)


def test_fractions_are_of_the_whole() -> None:
    assert resolve_memory_size(0.5, 101) == 50
    assert resolve_memory_size(7, 100) == 7
