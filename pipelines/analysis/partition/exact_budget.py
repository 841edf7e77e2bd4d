# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The least recomputation within a budget, proven: an integer program in CP-SAT, checked against liveness.

The program is that of ``recompute_program``. The peak that counts is that of ``liveness``, with kernels, packed copies
and waves, which no linear row expresses. Rows that hold for every plan stand in the program: at each kernel of the
backward, what its own ops hold, what is saved, and what is read again after it in any case. A plan that fits these but
exceeds the budget is excluded by a clause and the program solved again (logic-based Benders decomposition; J. Hooker
and G. Ottosson, 2003), so that the first that fits is the cheapest there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from retrograd.pipelines.analysis.kernels.fusion import find_steps
from retrograd.pipelines.analysis.kernels.liveness import find_live_bytes
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.op_kinds import OpKind
from retrograd.pipelines.analysis.partition.pareto import Floor, Point, find_front
from retrograd.pipelines.analysis.partition.partition_plan import PartitionPlan
from retrograd.pipelines.analysis.partition.recompute_program import RecomputeProgram, make_solver

# What it takes to judge a plan and to state the program again, in CP-SAT's deterministic time.
_JUDGED = 0.01


@dataclass(frozen=True)
class Proof:
    """Points that were found, and what they were proven against."""

    points: tuple[Point, ...]
    floors: tuple[Floor, ...]


class BudgetProgram(RecomputeProgram):
    """The integer program of the cheapest plan within a budget. ``costs`` are the seconds of each op."""

    def __init__(self, graph: JointGraph, costs: Sequence[float]) -> None:
        super().__init__(graph, costs)
        self.model.minimize(self.work)
        self.rows = find_memory_rows(graph, frozenset(self.saved))

    def limit(self, budget: int) -> None:
        """From here on, plans whose peak may be at most ``budget`` bytes."""
        for held, spans in self.rows:
            again = sum(size * (1 - self.saved[v]) for v, size in spans)
            self.model.add(self.kept + again <= budget - held)

    def exclude(self, plan: PartitionPlan, chosen: frozenset[int]) -> None:
        """No more the plan that ``chosen`` gave: less must be saved of what it keeps, or more of what it recomputes."""
        kept = [self.saved[v].negated() for v in plan.saved if v in chosen]
        made = (r for op in plan.backward for r in self.graph.ops[op].results)
        self.model.add_bool_or([*kept, *(self.saved[v] for v in made if v in self.saved and v not in chosen)])

    def solve(self, effort: float) -> tuple[frozenset[int] | None, float, float]:
        """The cheapest choice of values to save, ``None`` if there is none or none was found with so much effort; the
        least seconds that any costs (infinite if there is none), and the effort spent."""
        solver = make_solver(effort)
        status = solver.solve(self.model)
        spent = solver.response_proto.deterministic_time
        if status == cp_model.INFEASIBLE:
            return None, float("inf"), spent
        least = max(0.0, (solver.best_objective_bound - len(self.runs)) / self.scale)
        if status != cp_model.OPTIMAL:
            return None, least, spent
        return self.chosen(solver), least, spent


def find_memory_rows(graph: JointGraph, savable: frozenset[int]) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """For each kernel of the backward that depends on a tangent the bytes that it finds in memory under every plan
    besides what is saved, and the values, with their bytes, that it finds there if they are *not* saved, since they
    were recomputed before it and are read again by it or after it."""
    ops = tuple(sorted(graph.tangent_ops & graph.backward_ops))
    late = {r for op in ops for r in graph.ops[op].results}
    formed = find_steps(graph, ops, [v.id for v in graph.values if v.id not in late], graph.backward_results)
    owned = {b: size for b, size in formed.bytes.items() if b in late or b >= len(graph.values)}
    live = find_live_bytes(formed.steps, owned, range(len(formed.steps)))
    fixed = sum(graph.values[v].bytes for v in (*graph.forward_results, *graph.backward_results))
    place = {n: i for i, n in enumerate(n for n in ops if graph.ops[n].kind not in (OpKind.VIEW, OpKind.CONSTANT))}
    spans = {}
    for value in savable - set(graph.backward_results):
        used = [place[u] for u in graph.users[value] if u in place]
        # With two users it is written to memory, whatever it is made by.
        if len(used) > 1:
            spans[value] = (used[0], used[-1])
    rows: dict[tuple[tuple[int, int], ...], int] = {}
    for step, held in zip(formed.steps, live, strict=True):
        made = [w for w in step.writes if w < len(graph.values)]
        producer = graph.values[made[0]].producer if made else None
        if producer not in place:
            rows[()] = max(rows.get((), 0), held)
            continue
        at = place[producer]
        inside = tuple((v, graph.values[v].bytes) for v, (first, last) in sorted(spans.items()) if first <= at <= last)
        rows[inside] = max(rows.get(inside, 0), held)
    rows[()] = max(rows.get((), 0), 0)
    return [(fixed + held, inside) for inside, held in rows.items()]


def prove_front(
    program: BudgetProgram, known: Sequence[Point], judge: Callable[[frozenset[int]], Point | None], effort: float
) -> Proof:
    """The cheapest plan for each budget, from the highest to the least that one has; ``judge`` gives the point of a
    choice of values to save.

    Half of ``effort`` (CP-SAT's deterministic time, about seconds) goes to all budgets in turn. Where it runs out, the
    rest is shared among the budgets of the points that are left, so that each has a bound at least.
    """
    proof = _Prover(program, list(known), judge)
    budget: int | None = max(p.peak for p in known)
    left = effort / 2
    while budget is not None and left > 0:
        spent, done = proof.search(budget, left)
        left -= spent
        budget = proof.next_below(budget) if done else budget - 1
        if not done:
            break
    if budget is not None:
        rest = [p.peak for p in find_front(proof.points) if p.peak <= budget]
        for peak in rest:
            proof.search(peak, effort / 2 / len(rest))
    return Proof(find_front(proof.points), tuple(proof.floors))


class _Prover:
    """Solves the program for one budget after another, each below the last."""

    def __init__(
        self, program: BudgetProgram, points: list[Point], judge: Callable[[frozenset[int]], Point | None]
    ) -> None:
        self.program, self.points, self.judge = program, points, judge
        self.floors: list[Floor] = []
        self.tolerance = 2 * len(program.runs) / program.scale

    def search(self, budget: int, effort: float) -> tuple[float, bool]:
        """Find the cheapest plan within ``budget`` and record what is proven of it; also returns the effort spent, and
        whether it sufficed. Points that are known already need not be found again."""
        self.program.limit(budget)
        least, left = 0.0, effort
        while True:
            chosen, bound, spent = self.program.solve(left)
            # Rows and clauses only ever become more: a bound stays one.
            least, left = max(least, bound), left - spent
            if chosen is None or self._best(budget) <= least + self.tolerance:
                break
            point = self.judge(chosen)
            if point is None:
                raise RuntimeError("budget: the integer program gave a plan that is not legal")
            self.program.exclude(point.plan, chosen)
            self.points.append(point)
            left -= _JUDGED
            if left <= 0 or self._best(budget) <= point.cost:
                break
        self.floors.append(Floor(budget, min(least, self._best(budget))))
        return effort - left, self._best(budget) <= least + self.tolerance

    def next_below(self, budget: int) -> int | None:
        """The highest budget that the cheapest plan for ``budget`` does not keep; ``None`` if there is no plan."""
        best = self._best(budget)
        fitting = [p.peak for p in self.points if p.peak <= budget and p.cost <= best]
        return min(fitting) - 1 if fitting else None

    def _best(self, budget: int) -> float:
        return min((p.cost for p in self.points if p.peak <= budget), default=float("inf"))
