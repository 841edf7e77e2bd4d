# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The least recomputation whose peak of live bytes stays within a budget.

The whole trade between peak and recomputation is worked out once, as a curve, and the cheapest point within the
budget is taken: more memory never gives more recomputation, less never a higher peak. Candidates are

- the cuts at a range of prices per byte (see ``recompute_cut``), on their own and with checkpoints at no price between
  segments of the forward (T. Chen et al., "Training deep nets with sublinear memory cost", 2016);
- mixtures of neighbours on the curve, one for the first layers and the other for the rest;
- where a gap stays, the sets of fewest bytes at the costs in between, which no price per byte leads to, by an integer
  program (see ``recompute_program``);
- points with what would set off a large recomputation saved as well (see ``find_triggers``);
- points less a value.

All are judged by the lower of their peaks over the two schedules that may run: kernels side by side, and one at a time.
Lagrange's bound of the cuts says how far from the cheapest plan a point may be. What is done is limited by the size of
the graph and by deterministic effort, never by the clock, so that the same graph has the same curve. Of few values all
sets are judged.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, pairwise, zip_longest

from retrograd.contract.attributes import Tag
from retrograd.contract.partitions import BUDGET
from retrograd.pipelines.analysis.kernels.liveness import Peaks, compute_floor
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.min_cut import find_min_cut_partition
from retrograd.pipelines.analysis.partition.op_kinds import OpKind
from retrograd.pipelines.analysis.partition.pareto import Curve, Point, find_front
from retrograd.pipelines.analysis.partition.partition_plan import (
    PartitionPlan,
    find_default_partition,
    find_unsavable,
    plan_from_saved,
)
from retrograd.pipelines.analysis.partition.recompute_cut import CostModel, RecomputeCut
from retrograd.pipelines.analysis.partition.recompute_program import LeastSaved
from retrograd.pipelines.analysis.partition.schedule import sink_recomputation

# Into how many segments the forward is divided to find what its parts hand on to one another.
_SEGMENTS = range(2, 17)
# Of so few values that could be saved every set is judged.
_FEW = 10


@dataclass(frozen=True)
class BudgetOptions:
    """``cost`` prices recomputation. A graph of more than ``large_ops`` ops gets fewer candidates, and of those none
    that could better the curve by less than ``least_gain`` of a peak is judged; of others points on the curve are tried
    with a value more that sets recomputation off, each with ``triggers`` of them at most. Peaks on the curve that are
    more than ``spacing`` of the highest apart get plans in between, mixed and, with at most ``filling`` of CP-SAT's
    deterministic time for each, of fewest bytes to within ``filling_gap``; where costs are so far apart, ``rounds``
    times, the cheaper point is tried without one value, of ``drops`` at most."""

    cost: CostModel = field(default_factory=CostModel)
    large_ops: int = 4000
    least_gain: float = 0.004
    triggers: int = 4
    drops: int = 8
    rounds: int = 4
    spacing: float = 0.04
    filling: float = 0.25
    filling_gap: float = 0.01


def find_curve(graph: JointGraph, options: BudgetOptions | None = None) -> Curve:
    """All that the budget can buy: plans of falling peak and rising cost, the same each time."""
    options = options or BudgetOptions()
    # What the user would rather recompute costs nothing to run again.
    costs = [0.0 if op.tag is Tag.PREFER else options.cost.seconds(graph, op.id) for op in graph.ops]
    search = _Search(graph, costs, options.least_gain if len(graph.ops) > options.large_ops else 0.0)
    cuts = RecomputeCut(graph, costs)
    bounds: list[tuple[float, float]] = []
    for values in _propose(graph, cuts, options.large_ops, bounds):
        search.consider(values)
    for mixed in _interpolate(search.front(), graph, options):
        search.consider(mixed)
    if search.points and len(graph.ops) <= options.large_ops:
        for values in _fill_gaps(search.front(), graph, costs, options):
            search.consider(values)
        search.save_triggers(options)
        for _ in range(options.rounds):
            for fewer in _find_drops(search.front(), graph, options):
                search.consider(fewer)
    return Curve(search.front(), tuple(bounds), compute_floor(graph))


class _Search:
    """Plans of a graph that were judged: by their peak and by the seconds that they recompute. What a plan gains over
    one that costs no more is to be more than ``least_gain`` of its peak."""

    def __init__(self, graph: JointGraph, costs: Sequence[float], least_gain: float) -> None:
        self.graph, self.costs, self.least_gain = graph, costs, least_gain
        self.floor, self.peaks = compute_floor(graph), Peaks(graph)
        # As they are, these are what the other policies give.
        others = (find_default_partition(graph), find_min_cut_partition(graph))
        legal = [replace(plan, policy=BUDGET) for plan in others if find_unsavable(graph, plan) is None]
        self.points = [Point(self.peaks.least(plan), self._cost(plan), plan) for plan in legal]
        self.seen: set[tuple[int, ...]] = set()
        for plan in legal:
            self.consider(plan.saved)

    def consider(self, values: Iterable[int]) -> None:
        """Add the point of the plan that saves ``values``, unless one that is there is better or as good, whatever the
        plan's peak."""
        plan = plan_from_saved(self.graph, values, BUDGET)
        if plan.saved in self.seen or find_unsavable(self.graph, plan) is not None:
            return
        self.seen.add(plan.saved)
        cost, least = self._cost(plan), (1 + self.least_gain) * (self.floor + plan.saved_bytes)
        if not any(p.cost <= cost and p.peak <= least for p in self.points):
            self.points.append(self._point(plan))

    def save_triggers(self, options: BudgetOptions) -> None:
        """Consider points of the front with a checkpoint saved as well that sets recomputation off, and what comes of
        it likewise. Of points that are next to each other, one."""
        checkpoints = frozenset[int]().union(*(find_checkpoints(self.graph, n) for n in _SEGMENTS))
        done: list[Point] = []

        def is_new(point: Point) -> bool:
            peak, cost = (options.spacing / 4 * whole for whole in (front[0].peak, front[-1].cost))
            return all(abs(point.peak - p.peak) > peak or abs(point.cost - p.cost) > cost for p in done)

        while any(map(is_new, front := self.front())):
            # One generation at a time: what is found soon betters what more would come of.
            for point in filter(is_new, front):
                done.append(point)
                for value in find_triggers(self.graph, point.plan, checkpoints, options.triggers):
                    self.consider({*point.plan.saved, value})

    def front(self) -> tuple[Point, ...]:
        return find_front(self.points)

    def _point(self, plan: PartitionPlan) -> Point:
        sunk = sink_recomputation(self.graph, plan)
        return Point(self.peaks.least(sunk), self._cost(plan), sunk)

    def _cost(self, plan: PartitionPlan) -> float:
        return float(sum(self.costs[op] for op in plan.recomputed))


def _propose(
    graph: JointGraph, cuts: RecomputeCut, large_ops: int, bounds: list[tuple[float, float]]
) -> Iterator[frozenset[int]]:
    """Sets to save, at a range of prices with a range of segments; adds to ``bounds`` what the plain cuts prove."""
    total = max(1, sum(graph.values[v].saved_bytes for v in cuts.candidates))
    # At this price saving all costs as much as recomputing all.
    unit = (float(cuts.costs.sum()) or 1.0) / total
    yield frozenset(cuts.candidates)
    if len(cuts.candidates) <= _FEW:
        sizes = range(len(cuts.candidates))
        yield from map(frozenset, chain.from_iterable(combinations(cuts.candidates, size) for size in sizes))
    for power in range(-10, 11):
        cut = cuts.solve(unit * 2.0**power)
        bounds.append((unit * 2.0**power, cut.seconds))
        yield cut.saved
    is_large = len(graph.ops) > large_ops
    count, most = 2.0, max(2, len(graph.forward_ops) // 8)
    while count <= most:
        free = find_checkpoints(graph, round(count))
        for power in (1, 8) if is_large else (-4, -2, -1, 0, 1, 3, 8):
            yield cuts.solve(unit * 2.0**power, free).saved
        count *= 2.0 if is_large else 1.5


def _interpolate(front: tuple[Point, ...], graph: JointGraph, options: BudgetOptions) -> Iterator[set[int]]:
    """Sets between those of neighbours on the curve: up to some place in the forward what the dearer of the two saves,
    from there on what the cheaper does. Of repeated layers the first ones then recompute more than the rest."""
    for cheap, dear in pairwise(front):
        kept = set(dear.plan.saved)
        spare = [v for v in cheap.plan.saved if v not in kept]
        parts = _count_parts(cheap, dear, front[0].peak, options.spacing)
        total, done, number = sum(graph.values[v].saved_bytes for v in spare), 0, 1
        for place, value in enumerate(spare):
            done += graph.values[value].saved_bytes
            if number < parts and done * parts >= number * total:
                yield kept.union(spare[place + 1 :])
                number += 1


def _fill_gaps(
    front: tuple[Point, ...], graph: JointGraph, costs: Sequence[float], options: BudgetOptions
) -> Iterator[frozenset[int]]:
    """For costs between those of neighbours on the curve whose peaks are far apart, the sets of fewest bytes."""
    program = LeastSaved(graph, costs)
    for cheap, dear in pairwise(front):
        parts = _count_parts(cheap, dear, front[0].peak, options.spacing)
        for number in range(1, parts):
            limit = cheap.cost + (dear.cost - cheap.cost) * number / parts
            values = program.solve(limit, options.filling, options.filling_gap)
            if values is not None:
                yield values


def _count_parts(cheap: Point, dear: Point, highest: int, spacing: float) -> int:
    """The number of steps of peak into which what lies between two points is divided."""
    return min(8, math.ceil((cheap.peak - dear.peak) / (spacing * highest)))


def _find_drops(front: tuple[Point, ...], graph: JointGraph, options: BudgetOptions) -> Iterator[set[int]]:
    """Where the next point on the curve is dearer by more than ``spacing`` of the highest cost, what a point saves less
    one value: one of the largest ``drops``, of those that are worth a step of their own."""
    least = options.spacing / 16 * front[0].peak
    for cheap, dear in pairwise(front):
        if dear.cost - cheap.cost > options.spacing * front[-1].cost:
            sizes = {v: graph.values[v].saved_bytes for v in cheap.plan.saved}
            large = sorted((v for v, size in sizes.items() if size >= least), key=lambda v: (-sizes[v], v))
            yield from (set(cheap.plan.saved) - {value} for value in large[: options.drops])


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
    cuts: set[int] = set()
    for number in range(1, segments):
        low, high = (done * (3 * number + side) / (3 * segments) for side in (-1, 1))
        window = range(bisect_left(produced, low), bisect_right(produced, high))
        if window:
            cuts.add(min(window, key=lambda i: (crossing[i], i)))
    ordered = sorted(cuts)
    # Of the cuts from where a value is made on, one before its last use.
    following = [bisect_left(ordered, i) for i in range(len(forward))]
    return frozenset(
        v for i, n in enumerate(following) if n < len(ordered) for v in made[i] if last.get(v, -1) > ordered[n]
    )


def find_triggers(graph: JointGraph, plan: PartitionPlan, checkpoints: Collection[int], most: int) -> list[int]:
    """Find at most ``most`` of ``checkpoints``, values that the forward hands from one part to the next, that cut off
    what something in the backward of ``plan`` has computed anew when it first uses it: the most bytes first.

    Where a block of layers is recomputed, its result is often wanted first, by the gradient of the weight that it is
    multiplied with: all of the block is computed there and waits, while the backward is still at the layers behind it.
    With one value saved, what is in front of it is computed where the backward comes to it. No price per byte tells
    this: what is saved costs bytes and spares next to no recomputation.
    """
    before: dict[int, int] = {}
    for links in _find_chains(graph, plan):
        done, values = 0, graph.values
        for op, following in zip_longest(links, links[1:]):
            made = [r for r in graph.ops[op].results if graph.view_root(r) == r]
            # Of what one kernel makes of another's result, one is enough.
            further = () if following is None else graph.ops[following].results
            if not any(f in checkpoints and values[f].bytes == values[r].bytes for f in further for r in made):
                before.update((r, done) for r in made if r in checkpoints and done > values[r].bytes)
            done += sum(values[r].bytes for r in made)
    return sorted(before, key=lambda value: (-before[value], value))[:most]


def _find_chains(graph: JointGraph, plan: PartitionPlan) -> Iterator[list[int]]:
    """For each use of what is computed anew, in the backward's order, the ops that run for it and did not run before,
    in program order."""
    anew = {op for op in plan.backward if op not in graph.tangent_ops}
    saved, done = frozenset(plan.saved), set[int]()
    for number in plan.backward:
        if number in anew:
            continue
        for operand in graph.ops[number].operands:
            chain: list[int] = []
            pending = [operand]
            while pending:
                value = pending.pop()
                op = graph.values[value].producer
                if value in saved or op is None or op not in anew or op in done:
                    continue
                done.add(op)
                chain.append(op)
                pending.extend(graph.ops[op].operands)
            if chain:
                yield sorted(chain)
