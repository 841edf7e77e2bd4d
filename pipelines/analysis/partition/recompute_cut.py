# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which values to save where memory has a price: a minimum cut over seconds of recomputation plus price times bytes.

Saving a set of values under a limit of bytes is NP-hard; at a price for each byte it is a project selection, which a
maximum flow solves: an op runs again in the backward only if each of its operands is saved or runs again too. The cut
at a price is also Lagrange's lower bound on what a plan of so many saved bytes must recompute.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.graph.python import max_flow

from retrograd.contract.attributes import Tag
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.op_kinds import OpKind
from retrograd.pipelines.analysis.partition.partition_plan import UNREPEATABLE

_INFINITE = 2**40


@dataclass(frozen=True)
class Cut:
    """Values to save, and the seconds of the cut: recomputation plus price times bytes."""

    saved: frozenset[int]
    seconds: float


class RecomputeCut:
    """The cuts of one graph, at any price. ``costs`` are the seconds of each op.

    Each value is two nodes with the price of saving it between, each op a node to which the source leads at the cost of
    running it; what cannot be is infinite. Only these capacities differ from one price to the next.
    """

    def __init__(self, graph: JointGraph, costs: Sequence[float]) -> None:
        self.candidates = find_candidates(graph)
        self.priced = np.array(sorted({*self.candidates, *graph.mutated}), dtype=np.int64)
        self.bytes = np.array([graph.values[v].saved_bytes for v in self.priced], dtype=np.float64)
        self.source = 2 * len(graph.values) + len(graph.ops)
        self.sink = self.source + 1
        runs = [op.id for op in graph.ops if op.id not in graph.tangent_ops and op.kind not in UNREPEATABLE]
        self.costs = np.array([costs[op] if op in graph.forward_ops else 0.0 for op in runs], dtype=np.float64)
        self.per_value = np.full(len(graph.values), _INFINITE, dtype=np.int64)
        at_hand = [a for a in graph.arguments if a not in graph.tangents and a not in graph.mutated]
        self.per_value[at_hand] = 0
        values = 2 * np.arange(len(graph.values), dtype=np.int64)
        op_nodes = 2 * len(graph.values) + np.array(runs, dtype=np.int64)
        tails, heads = (np.array(ends, dtype=np.int64) for ends in zip(*self._fixed_arcs(graph), strict=True))
        self.tails = np.concatenate([tails, values, np.full(len(runs), self.source)])
        self.heads = np.concatenate([heads, values + 1, op_nodes])
        self.fixed = np.full(len(tails), _INFINITE, dtype=np.int64)

    def solve(self, price: float, free: Collection[int] = ()) -> Cut:
        """The cheapest set to save at ``price`` seconds per byte; the values of ``free`` cost nothing."""
        weights = price * self.bytes
        if free:
            weights[np.isin(self.priced, np.fromiter(free, dtype=np.int64))] = 0.0
        total = float(weights.sum() + self.costs.sum())
        scale = 2**38 / total if total else 1.0
        per_value = self.per_value.copy()
        # A value of no bytes weighs the least there is, so that it is not saved without need.
        per_value[self.priced] = np.maximum(1, np.rint(weights * scale).astype(np.int64))
        per_op = np.rint(self.costs * scale).astype(np.int64)
        solver = max_flow.SimpleMaxFlow()
        solver.add_arcs_with_capacity(self.tails, self.heads, np.concatenate([self.fixed, per_value, per_op]))
        status = solver.solve(self.source, self.sink)
        if status != solver.OPTIMAL:
            raise RuntimeError(f"budget: the flow solver gave {status.name}; partition='default' does without it")
        reached = np.zeros(self.sink + 1, dtype=bool)
        reached[solver.get_source_side_min_cut()] = True
        saved = self.priced[reached[2 * self.priced] & ~reached[2 * self.priced + 1]]
        return Cut(frozenset(saved.tolist()), solver.optimal_flow() / scale)

    def _fixed_arcs(self, graph: JointGraph) -> list[tuple[int, int]]:
        first = 2 * len(graph.values)
        arcs = [(self.source, 2 * a) for a in sorted(graph.mutated)]
        late = {r for op in graph.tangent_ops for r in graph.ops[op].results} | graph.tangents
        for op in graph.ops:
            if op.id in graph.tangent_ops:
                if op.id in graph.backward_ops:
                    arcs.extend((2 * v + 1, self.sink) for v in dict.fromkeys(op.operands) if v not in late)
                continue
            arcs.extend((2 * v + 1, first + op.id) for v in dict.fromkeys(op.operands))
            arcs.extend((first + op.id, 2 * r) for r in op.results)
            # What the forward does not need may run in the backward, once.
            if op.kind in UNREPEATABLE and op.id in graph.forward_ops:
                arcs.append((self.source, first + op.id))
        arcs.extend((2 * r + 1, self.sink) for r in dict.fromkeys(graph.backward_results) if r not in late)
        return arcs


def find_candidates(graph: JointGraph) -> tuple[int, ...]:
    """Values that can be saved and that the backward may use: tensors of the forward that are no constants and that the
    user did not say must be recomputed."""
    used = {o for op in graph.backward_ops for o in graph.ops[op].operands} | set(graph.backward_results)
    repeatable = {r for op in graph.ops if op.id not in graph.tangent_ops for r in op.results}
    constant = {r for op in graph.ops if op.kind is OpKind.CONSTANT or op.tag is Tag.MUST for r in op.results}
    savable = used & repeatable - constant
    return tuple(v.id for v in graph.values if v.is_tensor and v.id in savable)


@dataclass(frozen=True)
class Device:
    """The two ceilings of a device: floating-point operations and bytes of memory traffic, each per second."""

    flops: float
    bytes: float


# A core or two of a server; only the ratio decides which ops are cheap to run again.
HOST = Device(flops=1e11, bytes=2e10)


@dataclass(frozen=True)
class CostModel:
    """Seconds for an op: ``measured`` ones by the name of its first result, else the larger of what each ceiling of
    ``device`` says."""

    device: Device = HOST
    measured: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, graph: JointGraph, number: int) -> float:
        """Seconds for one op of ``graph``; constants and views are free."""
        op = graph.ops[number]
        if op.kind in (OpKind.CONSTANT, OpKind.VIEW):
            return 0.0
        name = graph.values[op.results[0]].name if op.results else ""
        if name in self.measured:
            return self.measured[name]
        read = {graph.view_root(v) for v in op.operands}
        moved = sum(graph.values[v].bytes for v in (*sorted(read), *op.results))
        return max(op.flops / self.device.flops, moved / self.device.bytes)

    def total(self, graph: JointGraph, ops: Iterable[int]) -> float:
        """Seconds for ``ops``, one after another."""
        return sum(self.seconds(graph, number) for number in ops)
