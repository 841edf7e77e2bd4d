# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The fewest bytes to save where recomputation is limited: against all sets of values, and where no price leads."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from graph_text import parse_graph
from test_min_cut_random import random_graph

from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.partition_plan import PartitionPlan, find_unsavable, plan_from_saved
from retrograd.pipelines.analysis.partition.recompute_cut import CostModel, RecomputeCut, find_candidates
from retrograd.pipelines.analysis.partition.recompute_program import LeastSaved

# Three values of which each costs as many FLOPs per byte to run again as the others.
EQUAL_PRICES = """
    input x 64
    tangent t 64
    a = !compute x 100
    b = !compute a 100
    c = !compute b 100
    g = pointwise t a b c 64
    forward c
    backward g
"""


def all_plans(graph: JointGraph) -> list[PartitionPlan]:
    """Every legal plan."""
    values = find_candidates(graph)
    sets = (chosen for size in range(len(values) + 1) for chosen in combinations(values, size))
    plans = [plan_from_saved(graph, chosen, "test") for chosen in sets]
    return [plan for plan in plans if find_unsavable(graph, plan) is None]


@pytest.mark.parametrize("seed", range(30))
def test_no_set_within_the_limit_has_fewer_bytes(seed: int) -> None:
    graph = random_graph(seed, ops=random.Random(seed).randint(4, 10), unit=64)
    costs = [CostModel().seconds(graph, op.id) for op in graph.ops]
    work = {plan.saved: CostModel().total(graph, plan.recomputed) for plan in all_plans(graph)}
    program = LeastSaved(graph, costs)
    # In no order: a program is used for one limit after another.
    for limit in random.Random(seed).sample(sorted(set(work.values())), len(set(work.values()))):
        least = min(plan.saved_bytes for plan in all_plans(graph) if work[plan.saved] <= limit)
        # Work is rounded to 2**40 parts of all there is.
        found = program.solve(limit * (1 + 1e-9), effort=1.0)
        assert found is not None
        plan = plan_from_saved(graph, found, "test")
        assert plan.saved_bytes == least
        assert work[plan.saved] <= limit * (1 + 1e-8)


def test_it_finds_what_no_price_per_byte_leads_to() -> None:
    graph = parse_graph(EQUAL_PRICES)
    flops = [float(op.flops) for op in graph.ops]
    cuts = RecomputeCut(graph, flops)
    priced = {len(cuts.solve(2.0**power).saved) for power in range(-8, 9)}
    assert priced == {0, 3}
    program = LeastSaved(graph, flops)
    assert [len(program.solve(limit, effort=1.0) or ()) for limit in (0, 100, 200, 300)] == [3, 2, 1, 0]


def test_where_the_limit_is_too_low_for_any_plan_there_is_none() -> None:
    graph = parse_graph(EQUAL_PRICES)
    assert LeastSaved(graph, [float(op.flops) for op in graph.ops]).solve(-1, effort=1.0) is None
