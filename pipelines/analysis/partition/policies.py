# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Policies of partitioning, as values: each makes a plan of a joint graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from retrograd.contract.partitions import BUDGET, DEFAULT, MIN_CUT
from retrograd.pipelines.analysis.kernels.liveness import Peaks, compute_peak
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.memory_size import resolve_memory_size
from retrograd.pipelines.analysis.partition.min_cut import find_min_cut_partition
from retrograd.pipelines.analysis.partition.pareto import Curve, Point
from retrograd.pipelines.analysis.partition.partition_plan import PartitionPlan, find_default_partition
from retrograd.pipelines.analysis.partition.schedule import schedule_plan


@dataclass(frozen=True)
class Decision:
    """A plan, and what is to be said of it besides itself: numbers, and lists of them, by name."""

    plan: PartitionPlan
    facts: Mapping[str, Any] = field(default_factory=dict)


class Policy(Protocol):
    """Decides what is saved. ``name`` and ``budget`` are the options of ``bwd-partition`` that stand for it in text, in
    a command that replays a failure; ``budget`` is ``None`` for policies without one."""

    @property
    def name(self) -> str:
        """The policy's name."""

    @property
    def budget(self) -> str | None:
        """Bytes, or a fraction of the peak of ``default``."""

    def decide(self, graph: JointGraph) -> Decision:
        """A plan for ``graph``.

        Raises:
            InfeasibleBudget: no plan stays within the budget.
        """


@dataclass(frozen=True)
class PlainPolicy:
    """A policy without a budget, which one function is."""

    name: str
    find_plan: Callable[[JointGraph], PartitionPlan]
    budget: None = None

    def decide(self, graph: JointGraph) -> Decision:
        """Decide by the function alone."""
        return Decision(self.find_plan(graph))


def find_lean_min_cut(graph: JointGraph) -> PartitionPlan:
    """The plan that saves the fewest bytes, or what ``default`` saves where that has a lower peak by liveness: what is
    computed again is in memory too, at a moment that may be the fullest."""
    plan = find_min_cut_partition(graph)
    if not plan.recomputed:
        return plan
    default, peaks = find_default_partition(graph), Peaks(graph)
    lean = peaks.least(schedule_plan(graph, plan)) <= peaks.least(schedule_plan(graph, default))
    return plan if lean else replace(default, policy=MIN_CUT)


POLICIES: dict[str, PlainPolicy] = {
    policy.name: policy
    for policy in (PlainPolicy(DEFAULT, find_default_partition), PlainPolicy(MIN_CUT, find_lean_min_cut))
}


@dataclass(frozen=True)
class WithinBudget:
    """The cheapest plan whose peak by liveness is at most ``size``: bytes (int), or a fraction (float) of the peak of
    ``default``."""

    size: int | float
    name: str = BUDGET

    @property
    def budget(self) -> str:
        """The size as text."""
        return str(self.size)

    def decide(self, graph: JointGraph) -> Decision:
        """A point of the graph's curve."""
        limit = resolve_memory_size(self.size, compute_peak(graph, find_default_partition(graph)).bytes)
        curve = find_curve(graph)
        return _describe(curve, curve.pick(limit), limit)


@dataclass(frozen=True)
class PointOfCurve:
    """A policy that is one point of a curve found of ``graph``: nothing is left to decide."""

    point: Point
    curve: Curve = field(repr=False, compare=False)
    graph: JointGraph = field(repr=False, compare=False)
    name: str = BUDGET

    @property
    def budget(self) -> str:
        """The point's peak, with which the curve gives it again."""
        return str(self.point.peak)

    def decide(self, graph: JointGraph) -> Decision:
        """The point's plan, which is for one graph.

        Raises:
            AssertionError: ``graph`` is another one.
        """
        if graph != self.graph:
            raise AssertionError("a plan was made for another graph than it is to be carried out on")
        return _describe(self.curve, self.point, self.point.peak)


def find_curve(graph: JointGraph) -> Curve:
    """The curve of a graph. Its solver is imported when a budget is first asked for: OR-Tools brings pandas, which
    takes longer to import than all that the other policies need."""
    from retrograd.pipelines.analysis.partition import budget

    return budget.find_curve(graph)


def _describe(curve: Curve, point: Point, limit: int) -> Decision:
    facts = {"pareto": curve.table(), "recompute_seconds": point.cost, "recompute_seconds_gap": curve.gap(limit)}
    return Decision(point.plan, facts)
