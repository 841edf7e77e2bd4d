# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The partition that saves the fewest bytes: a minimum cut between the forward's own and what the backward needs.

Source: H. He, "Min-cut optimal(*) recomputation (i.e. activation checkpointing) with AOTAutograd", 2022, and
``torch._functorch.partitioners.min_cut_rematerialization_partition``. Solved by OR-Tools' push-relabel maximum flow.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from ortools.graph.python import max_flow

from retrograd.pipelines.analysis.graph import JointGraph, Op, Tag
from retrograd.pipelines.analysis.op_kinds import OpKind
from retrograd.pipelines.analysis.partition_plan import UNREPEATABLE, PartitionPlan, plan_from_saved

_FUSIBLE = (OpKind.POINTWISE, OpKind.VIEW, OpKind.DATA_MOVEMENT, OpKind.CONSTANT)


@dataclass(frozen=True)
class MinCutOptions:
    """Heuristics on top of the cut; each forbids a recomputation that would cost more than the bytes it frees.

    ban_compute: matrix products and convolutions are never recomputed; their cost exceeds the memory traffic saved.
    ban_reductions: an op whose results are more than ``reduction_ratio`` times smaller than its operands is not
        recomputed: keeping them is cheap.
    ban_scatter: scatters are not recomputed.
    ban_materialized: a value that a non-fusible backward op takes is written to memory there anyway, so that
        recomputing it saves no traffic.
    max_distance: a fusible chain is cut where a use of it is more than this many forward ops away; recomputing across
        it would keep its operands alive for as long.
    max_chain: a fusible chain of more ops than this is not recomputed as a whole (each link reads what the last wrote).
    distance_base: values far from the backward weigh this factor more per step, so that the cut falls near its use.
    """

    ban_compute: bool = True
    ban_reductions: bool = True
    reduction_ratio: int = 4
    ban_scatter: bool = True
    ban_materialized: bool = True
    max_distance: int = 100
    max_chain: int = 3000
    distance_base: float = 1.1


def find_min_cut_partition(graph: JointGraph, options: MinCutOptions | None = None) -> PartitionPlan:
    """Values to save so that the fewest weighted bytes cross from forward to backward."""
    options = options or MinCutOptions()
    banned = find_banned(graph, options)
    return plan_from_saved(graph, find_cut(graph, banned, options), "min-cut")


def find_banned(graph: JointGraph, options: MinCutOptions) -> frozenset[int]:
    """Ops that the backward must not run: of the forward, and what must not run twice wherever it is.

    What the user asked to be recomputed never is, what the user asked not to be always.
    """
    tagged = {op.id for op in graph.ops if op.tag is not None}
    avoided = {number for number in tagged if graph.ops[number].tag in (Tag.AVOID, Tag.NEVER)}
    banned = {op.id for op in graph.ops if _is_banned_kind(op, options)}
    if options.ban_reductions:
        banned |= {op.id for op in graph.ops if _shrinks(graph, op, options.reduction_ratio)}
    if options.ban_materialized:
        banned |= find_materialized(graph)
    banned = (banned - tagged) | avoided
    banned |= find_far_apart(graph, banned, options) - tagged
    repeated = graph.forward_ops - graph.tangent_ops
    # An op that only the backward needs runs once in either half, but a part of its results must not come from each.
    unrepeatable = {op.id for op in graph.ops if op.kind in UNREPEATABLE and op.id not in graph.tangent_ops}
    return frozenset(op for op in banned & (repeated | unrepeatable) if graph.ops[op].kind is not OpKind.CONSTANT)


def _is_banned_kind(op: Op, options: MinCutOptions) -> bool:
    match op.kind:
        case OpKind.COMPUTE:
            return options.ban_compute
        case OpKind.SCATTER:
            return options.ban_scatter
    return op.kind in UNREPEATABLE


def _shrinks(graph: JointGraph, op: Op, ratio: int) -> bool:
    if op.kind in (OpKind.VIEW, OpKind.CONSTANT):
        return False
    taken = sum(graph.values[v].bytes for v in dict.fromkeys(op.operands))
    given = sum(graph.values[v].bytes for v in op.results)
    return 0 < given * ratio < taken


def find_materialized(graph: JointGraph) -> frozenset[int]:
    """Fusible forward ops whose result a non-fusible op of the backward takes directly, or through views."""
    found: set[int] = set()
    for number in graph.tangent_ops & graph.backward_ops:
        if graph.ops[number].kind in _FUSIBLE:
            continue
        for operand in graph.ops[number].operands:
            producer = graph.values[graph.view_root(operand)].producer
            if producer is not None and producer not in graph.tangent_ops:
                found.add(producer)
    return frozenset(found)


def find_far_apart(graph: JointGraph, banned: frozenset[int] | set[int], options: MinCutOptions) -> frozenset[int]:
    """Where fusible chains of the forward are broken: far from their next use, or longer than allowed."""
    order = {op: i for i, op in enumerate(sorted(graph.forward_ops))}
    found: set[int] = set()
    depth: dict[int, int] = {}
    for number in order:
        op = graph.ops[number]
        links = [depth.get(p, 0) for v in op.operands if (p := graph.values[v].producer) is not None]
        depth[number] = 0 if number in banned else 1 + max(links, default=0)
        if depth[number] > options.max_chain:
            found.add(number)
            depth[number] = 0
        used = [order[u] for r in op.results for u in graph.users[r] if u in order]
        if (
            number not in banned
            and used
            and max(used) - order[number] > options.max_distance
            and op.kind is not OpKind.VIEW
        ):
            found.add(number)
    return frozenset(found)


def find_distances(graph: JointGraph) -> list[int]:
    """For each op the number of steps to the backward: to an op that depends on a tangent (0 for those themselves), or
    to being a gradient that depends on none."""
    far = 10**9
    distance = [far] * len(graph.ops)
    gradients = {p for r in graph.backward_results if (p := graph.values[r].producer) is not None} - graph.tangent_ops
    tangent_ops = graph.tangent_ops & graph.backward_ops
    for op in tangent_ops:
        distance[op] = 0
    for op in gradients:
        distance[op] = 1
    pending = deque([*sorted(tangent_ops), *sorted(gradients)])
    while pending:
        op = pending.popleft()
        for operand in graph.ops[op].operands:
            producer = graph.values[operand].producer
            if producer is not None and distance[producer] > distance[op] + 1:
                distance[producer] = distance[op] + 1
                pending.append(producer)
    return distance


def find_cut(graph: JointGraph, banned: frozenset[int], options: MinCutOptions) -> frozenset[int]:
    """Values on the minimum cut. Each value is two nodes with its weight between; ops carry infinite capacity.

    Capacities are scaled to integers below 2**40, so that sums of infinite ones stay below 2**63.
    """
    weights = find_weights(graph, options)
    # Nothing flows through what the backward does not need, so that its weight must not cost the others precision.
    crossing = {o for op in graph.backward_ops for o in graph.ops[op].operands} | set(graph.backward_results)
    scale = min(1.0, 2**38 / max(1.0, sum(weights[v] for v in crossing if math.isfinite(weights[v]))))
    infinite = 2**40
    source, sink = 2 * len(graph.values), 2 * len(graph.values) + 1
    arcs: list[tuple[int, int, int]] = []
    for value, weight in zip(graph.values, weights, strict=True):
        unbounded = math.isinf(weight) or value.id not in crossing
        capacity = infinite if unbounded else max(1, round(weight * scale)) if weight else 0
        arcs.append((2 * value.id, 2 * value.id + 1, capacity))
    for argument in graph.arguments:
        # Any other argument is at hand in the backward at no cost: nothing flows to it from the source.
        if argument in graph.mutated:
            arcs.append((source, 2 * argument, infinite))
    for op in graph.ops:
        if op.id in graph.tangent_ops:
            if op.id in graph.backward_ops:
                arcs.extend((2 * v + 1, sink, infinite) for v in op.operands if not _backward_only(graph, v))
            continue
        arcs.extend((2 * v + 1, 2 * r, infinite) for v in dict.fromkeys(op.operands) for r in op.results)
        if op.id in banned:
            arcs.extend((source, 2 * r, infinite) for r in op.results)
    arcs.extend((2 * r + 1, sink, infinite) for r in graph.backward_results if not _backward_only(graph, r))
    return _solve(graph, arcs, source, sink)


def _backward_only(graph: JointGraph, value: int) -> bool:
    producer = graph.values[value].producer
    return value in graph.tangents or (producer is not None and producer in graph.tangent_ops)


def find_weights(graph: JointGraph, options: MinCutOptions) -> list[float]:
    """For each value what it costs to save it, in weighted bytes; infinite for what cannot be saved."""
    distance = find_distances(graph)
    weights = []
    for value in graph.values:
        if value.producer is None:
            weights.append(2.0 * value.bytes if value.id in graph.mutated else 0.0)
        elif not value.is_tensor or graph.ops[value.producer].kind is OpKind.CONSTANT:
            weights.append(math.inf)
        elif (tag := graph.ops[value.producer].tag) is not None and tag is not Tag.AVOID:
            # What must be saved costs nothing more, what is to be recomputed cannot be saved.
            weights.append(math.inf if tag.recomputes else 0.0)
        else:
            # Counted once for the backward's read, and once for the write, unless the forward writes it in any case.
            steps = max(1, min(distance[value.producer], 100))
            factor = 1.0 if _is_written(graph, value.id) else 2.0
            weights.append(value.saved_bytes * factor * options.distance_base**steps)
    return weights


def _is_written(graph: JointGraph, value: int) -> bool:
    """Whether the forward writes this value to memory in any case: an output, or made or taken by an unfusible op."""
    if value in graph.forward_results:
        return True
    producer = graph.values[value].producer
    if producer is not None and graph.ops[producer].kind not in _FUSIBLE:
        return True
    return any(graph.ops[u].kind not in _FUSIBLE for u in graph.users[value] if u not in graph.tangent_ops)


def _solve(graph: JointGraph, arcs: list[tuple[int, int, int]], source: int, sink: int) -> frozenset[int]:
    solver = max_flow.SimpleMaxFlow()
    tails, heads, capacities = (np.array(column, dtype=np.int64) for column in zip(*arcs, strict=True))
    solver.add_arcs_with_capacity(tails, heads, capacities)
    status = solver.solve(source, sink)
    if status != solver.OPTIMAL:
        raise RuntimeError(f"min-cut: the flow solver gave {status.name}")
    reached = set(solver.get_source_side_min_cut())
    return frozenset(v.id for v in graph.values if 2 * v.id in reached and 2 * v.id + 1 not in reached)
