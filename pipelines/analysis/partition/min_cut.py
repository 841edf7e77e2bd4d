# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The partition that saves the fewest bytes: a minimum cut between the forward's own and what the backward needs.

Source: H. He, "Min-cut optimal(*) recomputation (i.e. activation checkpointing) with AOTAutograd", 2022, and
``torch._functorch.partitioners.min_cut_rematerialization_partition``. Solved by OR-Tools' push-relabel maximum flow.
"""

from __future__ import annotations

import math

import numpy as np
from ortools.graph.python import max_flow

from retrograd.contract.attention import BACKWARD, DROPPED_BACKWARD, MASKED_BACKWARD
from retrograd.contract.attributes import Tag
from retrograd.contract.partitions import MIN_CUT
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph, Value
from retrograd.pipelines.analysis.partition.op_kinds import OpKind
from retrograd.pipelines.analysis.partition.partition_plan import PartitionPlan, plan_from_saved
from retrograd.pipelines.analysis.partition.recompute_bans import MinCutOptions, find_banned, find_distances, is_fusible

# What is read besides a value of the same size, such as a mean for each of its rows, and does not count.
_SMALL_PART = 1 / 16


def find_min_cut_partition(graph: JointGraph, options: MinCutOptions | None = None) -> PartitionPlan:
    """Values to save so that the fewest weighted bytes cross from forward to backward.

    Of a matrix and its transpose, which are as large, the matrix: products read it either way, and to save the
    transpose is to write it to memory in that order. Of the parts of a tensor that attention reads, which are as large
    together, that tensor: kernels of ours read them where they lie.
    """
    options = options or MinCutOptions()
    banned = find_banned(graph, options)
    saved = {_as_it_lies(graph, value) for value in find_cut(graph, banned, options)}
    return plan_from_saved(graph, _join_parts(graph, saved), MIN_CUT)


def _join_parts(graph: JointGraph, saved: set[int]) -> set[int]:
    """Choose what to save in place of parts of a tensor that attention alone reads in the backward."""
    parts: dict[int, set[int]] = {}
    for value in saved:
        readers = [graph.ops[user] for user in graph.users[value] if user in graph.tangent_ops]
        if readers and all(op.name in (BACKWARD, DROPPED_BACKWARD, MASKED_BACKWARD) for op in readers):
            parts.setdefault(_find_whole(graph, value), set()).add(value)
    joined = set(saved)
    for whole, own in parts.items():
        if sum(graph.values[part].saved_bytes for part in own) == graph.values[whole].saved_bytes:
            joined = joined - own | {whole}
    return joined


def _find_whole(graph: JointGraph, value: int) -> int:
    """The tensor that a value is a view of, as far as nobody asked for something of these views."""
    producer = graph.values[value].producer
    if producer is None:
        return value
    op = graph.ops[producer]
    source = graph.values[op.operands[0]].producer if op.operands else None
    if op.kind is not OpKind.VIEW or source is None or op.tag is not None or graph.ops[source].tag is not None:
        return value
    return _find_whole(graph, op.operands[0])


def _as_it_lies(graph: JointGraph, value: int) -> int:
    """Choose what to save in place of ``value``: the matrix that it is the transposition of, if that takes the same
    bytes."""
    matrix = graph.transposed.get(value, value)
    producer = graph.values[matrix].producer
    if producer is None or graph.values[matrix].saved_bytes != graph.values[value].saved_bytes:
        return value
    op = graph.ops[producer]
    recomputed = op.tag is not None and op.tag.recomputes
    return value if recomputed or op.kind is OpKind.CONSTANT else matrix


def find_cut(graph: JointGraph, banned: frozenset[int], options: MinCutOptions) -> frozenset[int]:
    """Values on the minimum cut. Each value is two nodes with its weight between; ops carry infinite capacity.
    Capacities are scaled to integers below 2**40, so that sums of infinite ones stay below 2**63."""
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
        if argument in graph.mutated or (not options.free_arguments and argument not in graph.tangents):
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
    unsavable = (OpKind.CONSTANT,) if options.save_views else (OpKind.CONSTANT, OpKind.VIEW)
    weights = []
    for value in graph.values:
        if value.producer is None:
            weights.append(_argument_weight(graph, value, options))
        elif not value.is_tensor or graph.ops[value.producer].kind in unsavable:
            weights.append(math.inf)
        elif (tag := graph.ops[value.producer].tag) is not None and tag is not Tag.AVOID:
            # What must be saved costs nothing more, what is to be recomputed cannot be saved.
            weights.append(math.inf if tag.recomputes else 0.0)
        else:
            # Counted once for the backward's read, and once for the write, unless the forward writes it in any case.
            steps = max(1, min(distance[value.producer], options.max_distance))
            factor = 1.0 if _is_written(graph, value.id) else options.fused_weight
            weights.append(value.saved_bytes * factor * options.distance_base**steps)
    return weights


def _argument_weight(graph: JointGraph, value: Value, options: MinCutOptions) -> float:
    if value.id in graph.mutated:
        # The step overwrites it: to save it is to copy it.
        return 2.0 * value.bytes
    return 0.0 if options.free_arguments or value.id in graph.tangents else float(value.bytes)


def _is_written(graph: JointGraph, value: int) -> bool:
    """Whether this value is written to memory in any case: a result, between ops that do not fuse, or read again behind
    a reduction of it."""
    if value in graph.forward_results or value in graph.backward_results:
        return True
    producer = graph.values[value].producer
    if producer is None:
        return False
    if not all(is_fusible(graph, producer, user) for user in graph.users[value]):
        return True
    return not _costs_one_read(graph, producer) and _is_read_behind_reduction(graph, value)


def _costs_one_read(graph: JointGraph, number: int) -> bool:
    """Whether to run an op once more reads hardly more than its result: kernels do that in place of reading it."""
    taken = sum(graph.values[value].bytes for value in graph.reads[number])
    return graph.ops[number].kind is OpKind.POINTWISE and taken <= graph.count_bytes(number) * (1 + _SMALL_PART)


def _is_read_behind_reduction(graph: JointGraph, value: int) -> bool:
    """Whether the forward reduces ``value`` and then takes it once more, as a normalization does with its input: no
    kernel does both."""
    users = {user for user in graph.users[value] if user in graph.forward_ops}
    pending = [user for user in users if graph.ops[user].kind is OpKind.REDUCTION]
    seen, last = set(pending), max(users, default=0)
    while pending:
        for result in graph.ops[pending.pop()].results:
            for user in graph.users[result]:
                if user in users:
                    return True
                if user < last and user not in seen:
                    seen.add(user)
                    pending.append(user)
    return False


def _solve(graph: JointGraph, arcs: list[tuple[int, int, int]], source: int, sink: int) -> frozenset[int]:
    reached = find_source_side(arcs, source, sink)
    return frozenset(v.id for v in graph.values if 2 * v.id in reached and 2 * v.id + 1 not in reached)


def find_source_side(arcs: list[tuple[int, int, int]], source: int, sink: int) -> frozenset[int]:
    """The nodes on the source's side of the minimum cut of a network whose source's side is smallest. ``arcs`` are
    tail, head and capacity.

    Raises:
        RuntimeError: the solver failed.
    """
    solver = max_flow.SimpleMaxFlow()
    tails, heads, capacities = (np.array(column, dtype=np.int64) for column in zip(*arcs, strict=True))
    solver.add_arcs_with_capacity(tails, heads, capacities)
    status = solver.solve(source, sink)
    if status != solver.OPTIMAL:
        raise RuntimeError(f"min-cut: the flow solver gave {status.name}; partition='default' does without it")
    return frozenset(solver.get_source_side_min_cut())
