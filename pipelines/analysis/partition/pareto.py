# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Partition plans between memory and recomputation: none has both a lower peak and a lower cost than another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from retrograd.contract.errors import RetrogradError
from retrograd.pipelines.analysis.partition.partition_plan import PartitionPlan


class InfeasibleBudget(RetrogradError, ValueError):
    """No plan stays within the budget. ``least`` is the smallest number of bytes that one stays within. ``eager`` are
    those that a step takes in eager, where that is known, and ``reason`` says what no plan goes below."""

    def __init__(self, budget: int, least: int, eager: int | None = None, reason: str = "") -> None:
        beside = "" if eager is None else f", and a step in eager takes {eager}"
        feasible = f"the least feasible one is {least} bytes{beside}"
        because = f"; {reason}" if reason else ""
        super().__init__(f"a memory budget of {budget} bytes is infeasible; {feasible}{because}")
        self.budget = budget
        self.least = least
        self.eager = eager


@dataclass(frozen=True)
class Point:
    """A plan, its peak of live bytes, and the seconds that its recomputation takes."""

    peak: int
    cost: float
    plan: PartitionPlan


@dataclass(frozen=True)
class Curve:
    """Points of rising cost and falling peak, and what is proven of all plans.

    ``bounds`` are lines (seconds per byte, seconds) under the cost of every plan: a plan that saves ``n`` bytes costs
    at least ``seconds - n * seconds_per_byte``. ``held`` is what the backward of every plan holds at its worst moment
    besides what is saved.
    """

    points: tuple[Point, ...]
    bounds: tuple[tuple[float, float], ...] = ()
    held: int = 0

    def pick(self, budget: int) -> Point:
        """The cheapest point whose peak is at most ``budget`` bytes: with more bytes, neither more recomputation nor,
        with fewer, a higher peak.

        Raises:
            InfeasibleBudget: there is none.
        """
        for point in self.points:
            if point.peak <= budget:
                return point
        raise InfeasibleBudget(budget, self.points[-1].peak)

    def table(self) -> list[list[int | float]]:
        """The points as bytes and seconds, for reports."""
        return [[point.peak, point.cost] for point in self.points]

    def bound(self, budget: int) -> float:
        """Seconds of recomputation that any plan within ``budget`` bytes needs at least."""
        return max((fixed - slope * (budget - self.held) for slope, fixed in self.bounds), default=0.0)

    def gap(self, budget: int) -> float:
        """Seconds by which the point for ``budget`` may be dearer than the cheapest plan that there is.

        Raises:
            InfeasibleBudget: no point is within the budget.
        """
        return max(0.0, self.pick(budget).cost - max(0.0, self.bound(budget)))


def find_front(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points that no other is better than in both respects, by rising cost."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost, p.peak, len(p.plan.saved), p.plan.saved)):
        if not front or point.peak < front[-1].peak:
            front.append(point)
    return tuple(front)
