# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which values to save where memory has a price: a minimum cut over seconds of recomputation plus price times bytes.

Saving a set of values under a limit of bytes is NP-hard; at a price for each byte it is a project selection, which a
maximum flow solves: an op runs again in the backward only if each of its operands is saved or runs again too. The cut
at a price is also Lagrange's lower bound on what a plan of so many saved bytes must recompute.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from ortools.graph.python import max_flow

from retrograd.pipelines.analysis.graph import JointGraph, Tag
from retrograd.pipelines.analysis.op_kinds import OpKind
from retrograd.pipelines.analysis.partition_plan import UNREPEATABLE

_INFINITE = 2**40


@dataclass(frozen=True)
class Cut:
    """Values to save, and the seconds of the cut: recomputation plus price times bytes."""

    saved: frozenset[int]
    seconds: float


class RecomputeCut:
    """The cuts of one graph, at any price. ``costs`` are the seconds of each op."""

    def __init__(self, graph: JointGraph, costs: Sequence[float]) -> None:
        self.graph = graph
        self.costs = [costs[op.id] if op.id in graph.forward_ops else 0.0 for op in graph.ops]
        self.candidates = find_candidates(graph)
        self.source = 2 * len(graph.values) + len(graph.ops)
        self.sink = self.source + 1
        self.fixed = self._fixed_arcs()

    def solve(self, price: float, free: Collection[int] = ()) -> Cut:
        """The cheapest set to save at ``price`` seconds per byte; the values of ``free`` cost nothing."""
        graph = self.graph
        weights = {
            v: 0.0 if v in free else price * graph.values[v].saved_bytes for v in (*self.candidates, *graph.mutated)
        }
        total = sum(weights.values()) + sum(self.costs)
        scale = 2**38 / total if total else 1.0
        arcs = list(self.fixed)
        for value in graph.values:
            # A value of no bytes weighs the least there is, so that it is not saved without need.
            capacity = max(1, round(weights[value.id] * scale)) if value.id in weights else _INFINITE
            if value.producer is None and value.id not in graph.mutated:
                capacity = 0 if value.id not in graph.tangents else _INFINITE
            arcs.append((2 * value.id, 2 * value.id + 1, capacity))
        for op in graph.ops:
            if op.id not in graph.tangent_ops and op.kind not in UNREPEATABLE:
                arcs.append((self.source, self._node(op.id), round(self.costs[op.id] * scale)))
        solver = max_flow.SimpleMaxFlow()
        tails, heads, capacities = (np.array(column, dtype=np.int64) for column in zip(*arcs, strict=True))
        solver.add_arcs_with_capacity(tails, heads, capacities)
        status = solver.solve(self.source, self.sink)
        if status != solver.OPTIMAL:
            raise RuntimeError(f"budget: the flow solver gave {status.name}")
        reached = set(solver.get_source_side_min_cut())
        saved = frozenset(v for v in weights if 2 * v in reached and 2 * v + 1 not in reached)
        return Cut(saved, solver.optimal_flow() / scale)

    def _node(self, op: int) -> int:
        return 2 * len(self.graph.values) + op

    def _fixed_arcs(self) -> list[tuple[int, int, int]]:
        graph = self.graph
        arcs = [(self.source, 2 * a, _INFINITE) for a in sorted(graph.mutated)]
        late = {r for op in graph.tangent_ops for r in graph.ops[op].results} | graph.tangents
        for op in graph.ops:
            if op.id in graph.tangent_ops:
                if op.id in graph.backward_ops:
                    arcs.extend((2 * v + 1, self.sink, _INFINITE) for v in dict.fromkeys(op.operands) if v not in late)
                continue
            arcs.extend((2 * v + 1, self._node(op.id), _INFINITE) for v in dict.fromkeys(op.operands))
            arcs.extend((self._node(op.id), 2 * r, _INFINITE) for r in op.results)
            # What the forward does not need may run in the backward, once.
            if op.kind in UNREPEATABLE and op.id in graph.forward_ops:
                arcs.append((self.source, self._node(op.id), _INFINITE))
        arcs.extend((2 * r + 1, self.sink, _INFINITE) for r in dict.fromkeys(graph.backward_results) if r not in late)
        return arcs


def find_candidates(graph: JointGraph) -> tuple[int, ...]:
    """Values that can be saved and that the backward may use: tensors of the forward that are no constants and that the
    user did not say must be recomputed."""
    used = {o for op in graph.backward_ops for o in graph.ops[op].operands} | set(graph.backward_results)
    repeatable = {r for op in graph.ops if op.id not in graph.tangent_ops for r in op.results}
    constant = {r for op in graph.ops if op.kind is OpKind.CONSTANT or op.tag is Tag.MUST for r in op.results}
    return tuple(v.id for v in graph.values if v.is_tensor and v.id in used & repeatable - constant)
