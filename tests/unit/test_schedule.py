# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""When a backward runs what it recomputes: right before it is used, for no more memory than before."""

from __future__ import annotations

import pytest
from graph_text import parse_graph, value_names
from hypothesis import given, settings
from hypothesis import strategies as st
from test_min_cut_random import random_graph

from retrograd.pipelines.analysis.kernels.fusion import find_steps
from retrograd.pipelines.analysis.kernels.liveness import compute_scratch
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.partition_plan import plan_from_saved
from retrograd.pipelines.analysis.partition.recompute_cut import find_candidates
from retrograd.pipelines.analysis.partition.schedule import find_low_schedule, find_paths, sink_order

# One step of the backward needs a short chain and a long one, another a third.
CHAINS = parse_graph("""
    input x 4096
    tangent t 4096
    short = compute x 4096
    a = compute x 4096
    b = compute a 4096
    late = compute b 4096
    g = compute t short b 4096
    h = compute g late 4096
    forward x
    backward h
""")
EVERY = tuple(range(len(CHAINS.ops)))


def scratch(graph: JointGraph, ops: tuple[int, ...], available: tuple[int, ...], *, in_order: bool = False) -> int:
    return compute_scratch(find_steps(graph, ops, available, graph.backward_results), in_order=in_order)


def names(graph: JointGraph, ops: tuple[int, ...]) -> list[str]:
    return value_names(graph, [graph.ops[op].results[0] for op in ops])


def assert_legal(graph: JointGraph, ops: tuple[int, ...], available: tuple[int, ...]) -> None:
    at_hand = set(available)
    for op in ops:
        assert at_hand.issuperset(graph.ops[op].operands), f"op {op} runs before what it takes is there"
        at_hand.update(graph.ops[op].results)


def test_the_critical_path_goes_first() -> None:
    paths = find_paths(CHAINS, EVERY, CHAINS.arguments)
    assert paths[2] == 2 * paths[0] > 0
    order = sink_order(CHAINS, EVERY, CHAINS.arguments, paths)
    assert names(CHAINS, order) == ["a", "b", "short", "g", "late", "h"]


def test_program_order_without_paths() -> None:
    order = sink_order(CHAINS, EVERY, CHAINS.arguments)
    assert names(CHAINS, order) == ["short", "a", "b", "g", "late", "h"]


def test_what_is_at_hand_does_not_count() -> None:
    at_hand = (*CHAINS.arguments, *CHAINS.ops[1].results)
    ops = tuple(op for op in EVERY if op != 1)
    paths = find_paths(CHAINS, ops, at_hand)
    assert paths[2] == paths[0] == paths[3] / 2
    assert names(CHAINS, sink_order(CHAINS, ops, at_hand, paths)) == ["short", "b", "g", "late", "h"]


def test_sinking_frees_memory() -> None:
    lines = ["input x 4096", "tangent g0 4096"]
    for i in range(5):
        lines += [f"a{i} = compute {'x' if i == 0 else 'x a0'} 4096"]
    lines += [f"g{i + 1} = compute g{i} a{i} 4096" for i in range(5)]
    graph = parse_graph("\n".join([*lines, "forward x", "backward g5"]))
    ops = tuple(range(len(graph.ops)))
    found = find_low_schedule(graph, ops, graph.arguments)
    assert names(graph, found)[:4] == ["a0", "g1", "a1", "g2"]
    assert scratch(graph, found, graph.arguments) < scratch(graph, ops, graph.arguments)


def test_where_sinking_takes_memory_ops_stay() -> None:
    # A small value is made of a large one that nothing else keeps alive for long.
    graph = parse_graph("""
        input x 64
        tangent t 64
        large = compute x 65536
        small = compute large 64
        wide = compute t large 65536
        g = compute wide 65536
        h = compute g small 64
        forward x
        backward h
    """)
    ops = tuple(range(len(graph.ops)))
    sunk = sink_order(graph, ops, graph.arguments)
    assert scratch(graph, sunk, graph.arguments) > scratch(graph, ops, graph.arguments)
    assert find_low_schedule(graph, ops, graph.arguments) == ops


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), ops=st.integers(2, 40), kept=st.integers(1, 4), in_order=st.booleans())
def test_never_more_memory_and_the_same_ops_in_a_legal_order(seed: int, ops: int, kept: int, in_order: bool) -> None:
    graph = random_graph(seed, ops=ops, unit=512)
    plan = plan_from_saved(graph, find_candidates(graph)[::kept], "test")
    available = (*graph.arguments, *plan.saved)
    found = find_low_schedule(graph, plan.backward, available, in_order=in_order)
    assert sorted(found) == sorted(plan.backward)
    assert_legal(graph, found, available)
    most = scratch(graph, plan.backward, available, in_order=in_order)
    assert scratch(graph, found, available, in_order=in_order) <= most


@pytest.mark.parametrize("seed", range(20))
def test_tangents_set_the_pace(seed: int) -> None:
    graph = random_graph(seed, ops=30)
    plan = plan_from_saved(graph, (), "test")
    available = (*graph.arguments, *plan.saved)
    order = sink_order(graph, plan.backward, available, find_paths(graph, plan.backward, available))
    late = [op for op in plan.backward if op in graph.tangent_ops]
    assert [op for op in order if op in graph.tangent_ops] == late
