# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The least recomputation whose peak of live bytes stays within a budget.

The whole trade between peak and recomputation is worked out once, as a curve, and the cheapest point within the
budget is taken: more memory never gives more recomputation, less never a higher peak. Of a small graph every set of
values to save is tried. Of others, candidates are the cuts at a range of prices per byte (see ``recompute_cut``), on
their own and with checkpoints at no price between segments of the forward (T. Chen et al., "Training deep nets with
sublinear memory cost", 2016), all judged by their peak over the schedule that will run. Lagrange's bound of the cuts
says how far from the cheapest plan a point may be. No limit of time plays a part, so that the same graph has the same
curve; the number of candidates falls with its size instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

from retrograd.pipelines.analysis.graph import JointGraph, Tag
from retrograd.pipelines.analysis.liveness import compute_floor, compute_peak
from retrograd.pipelines.analysis.min_cut import find_min_cut_partition
from retrograd.pipelines.analysis.op_kinds import OpKind
from retrograd.pipelines.analysis.pareto import Curve, Point, find_front
from retrograd.pipelines.analysis.partition_plan import (
    PartitionPlan,
    find_default_partition,
    find_unsavable,
    plan_from_saved,
)
from retrograd.pipelines.analysis.recompute_cost import CostModel
from retrograd.pipelines.analysis.recompute_cut import RecomputeCut, find_candidates
from retrograd.pipelines.analysis.schedule import sink_recomputation

POLICY = "budget"


@dataclass(frozen=True)
class BudgetOptions:
    """``cost`` prices recomputation. Every set is tried of up to ``exact_values`` values that could be saved. A graph
    of more than ``large_ops`` ops gets fewer candidates."""

    cost: CostModel = field(default_factory=CostModel)
    exact_values: int = 12
    large_ops: int = 4000


def find_budget_partition(graph: JointGraph, budget_bytes: int, options: BudgetOptions | None = None) -> PartitionPlan:
    """The plan of least recomputation whose peak, by ``liveness``, is at most ``budget_bytes``.

    Raises:
        InfeasibleBudget: no plan that was found has so low a peak; says the least that one has.
    """
    return find_curve(graph, options).pick(budget_bytes).plan


def find_curve(graph: JointGraph, options: BudgetOptions | None = None) -> Curve:
    """All that the budget can buy: plans of falling peak and rising cost, the same each time."""
    options = options or BudgetOptions()
    # What the user would rather recompute costs nothing to run again.
    costs = [0.0 if op.tag is Tag.PREFER else options.cost.seconds(graph, op.id) for op in graph.ops]
    candidates = find_candidates(graph)
    bounds: list[tuple[float, float]] = []
    if len(candidates) <= options.exact_values:
        sets: Iterable[Iterable[int]] = _subsets(candidates)
    else:
        cuts = RecomputeCut(graph, costs)
        sets = _propose(graph, cuts, options.large_ops, bounds)
    # As they are, these are what the other policies give.
    others = (find_default_partition(graph), find_min_cut_partition(graph))
    plans = [replace(plan, policy=POLICY) for plan in others]
    found = [_judge(graph, plan, costs) for plan in plans if find_unsavable(graph, plan) is None]
    seen: set[tuple[int, ...]] = set()
    for values in (*(plan.saved for plan in others), *sets):
        plan = plan_from_saved(graph, values, POLICY)
        if plan.saved not in seen and find_unsavable(graph, plan) is None:
            seen.add(plan.saved)
            found.append(_judge(graph, sink_recomputation(graph, plan), costs))
    return Curve(find_front(found), tuple(bounds), compute_floor(graph))


def _judge(graph: JointGraph, plan: PartitionPlan, costs: list[float]) -> Point:
    return Point(compute_peak(graph, plan).bytes, float(sum(costs[op] for op in plan.recomputed)), plan)


def _subsets(values: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for size in range(len(values) + 1):
        yield from combinations(values, size)


def _propose(
    graph: JointGraph, cuts: RecomputeCut, large_ops: int, bounds: list[tuple[float, float]]
) -> Iterator[frozenset[int]]:
    """Sets to save, at a range of prices with a range of segments; adds to ``bounds`` what the plain cuts prove."""
    total = max(1, sum(graph.values[v].bytes for v in cuts.candidates))
    # At this price saving all costs as much as recomputing all.
    unit = (sum(cuts.costs) or 1.0) / total
    yield frozenset(cuts.candidates)
    for power in range(-10, 11):
        cut = cuts.solve(unit * 2.0**power)
        bounds.append((unit * 2.0**power, cut.seconds))
        yield cut.saved
    is_large = len(graph.ops) > large_ops
    count, most = 2.0, max(2, len(graph.forward_ops) // 8)
    while count <= most:
        free = find_checkpoints(graph, round(count))
        for power in (-2, 1, 8) if is_large else (-4, -2, -1, 0, 1, 3, 8):
            yield cuts.solve(unit * 2.0**power, free).saved
        count *= 2.0 if is_large else 1.5


def find_checkpoints(graph: JointGraph, segments: int) -> frozenset[int]:
    """Values that cross from one segment of the forward to the next: as many segments of about as many bytes, cut where
    the fewest bytes cross."""
    forward = sorted(graph.forward_ops)
    place = {op: i for i, op in enumerate(forward)}
    last: dict[int, int] = {}
    for op in forward:
        for operand in graph.ops[op].operands:
            last[graph.view_root(operand)] = place[op]
    made = [
        [r for r in graph.ops[op].results if graph.ops[op].kind not in (OpKind.VIEW, OpKind.CONSTANT)] for op in forward
    ]
    crossing, change = [0] * len(forward), [0] * (len(forward) + 1)
    done, produced = 0, [0] * len(forward)
    for i, results in enumerate(made):
        for value in results:
            change[i] += graph.values[value].bytes
            change[max(i, last.get(value, i))] -= graph.values[value].bytes
            done += graph.values[value].bytes
        produced[i] = done
    live = 0
    for i in range(len(forward)):
        live += change[i]
        crossing[i] = live
    found: set[int] = set()
    for number in range(1, segments):
        low, high = (done * (3 * number + side) / (3 * segments) for side in (-1, 1))
        window = [i for i in range(len(forward)) if low <= produced[i] <= high]
        if not window:
            continue
        cut = min(window, key=lambda i: (crossing[i], i))
        found.update(v for i in range(cut + 1) for v in made[i] if last.get(v, -1) > cut)
    return frozenset(found)
