# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What sets recomputation off in a backward, and what saving it is worth."""

from __future__ import annotations

from graph_text import value_names
from test_budget import gpt, layers

from retrograd.pipelines.analysis.partition.budget import BudgetOptions, find_curve, find_triggers
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.partition_plan import plan_from_saved
from retrograd.pipelines.analysis.partition.schedule import sink_recomputation


def triggers(graph: JointGraph, saved: str, checkpoints: str, most: int = 8) -> list[str]:
    ids = {v.name: v.id for v in graph.values}
    plan = sink_recomputation(graph, plan_from_saved(graph, [ids[name] for name in saved.split()], "test"))
    return value_names(graph, find_triggers(graph, plan, {ids[name] for name in checkpoints.split()}, most))


def test_of_a_chain_all_checkpoints_with_something_in_front_of_them() -> None:
    graph = layers(4, branches=2)
    assert triggers(graph, "", "p0_1 p1_1 p2_1") == ["p2_1", "p1_1", "p0_1"]
    assert triggers(graph, "", "p0_1 p1_1 p2_1", most=1) == ["p2_1"]
    # What the backward's first use does not lead to is computed at a later one.
    assert triggers(graph, "p2_1 p1_1", "p0_1 p1_1 p2_1 p3_1") == ["p0_1"]
    # There is nothing in front of the first op, and no more than its own bytes in front of the second.
    assert triggers(graph, "", "m0 p0_0") == []


def test_of_what_one_kernel_makes_of_another_the_last() -> None:
    assert triggers(layers(4, branches=2), "", "m2 p2_0 p2_1") == ["p2_1"]


def test_what_is_saved_sets_nothing_off() -> None:
    graph = layers(3)
    everything = " ".join(f"m{i} p{i}_0" for i in range(3))
    assert triggers(graph, everything, everything) == []


def test_plans_with_less_recomputation_are_found_and_none_is_lost() -> None:
    graph = gpt(6)
    without = find_curve(graph, BudgetOptions(triggers=0, rounds=0)).points
    for fewer in (BudgetOptions(rounds=0), BudgetOptions(triggers=0)):
        found = find_curve(graph, fewer).points
        assert all(any(q.peak <= p.peak and q.cost <= p.cost for q in found) for p in without)
        assert len({p.plan.saved for p in found} - {p.plan.saved for p in without}) >= 3
