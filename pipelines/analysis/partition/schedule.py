# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""When a backward runs what it recomputes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from retrograd.pipelines.analysis.kernels.fusion import find_steps
from retrograd.pipelines.analysis.kernels.in_order_kernels import order_kernels
from retrograd.pipelines.analysis.kernels.liveness import compute_scratch
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.partition_plan import PartitionPlan
from retrograd.pipelines.analysis.partition.recompute_cut import CostModel


def sink_recomputation(graph: JointGraph, plan: PartitionPlan) -> PartitionPlan:
    """``plan`` with each recomputed op right before its first use in the backward, in place of at its beginning, where
    what it gives would be alive for as long as if it had been saved."""
    return dataclasses.replace(plan, backward=sink_order(graph, plan.backward, plan.saved))


def sink_order(
    graph: JointGraph, ops: Sequence[int], available: Collection[int], paths: Sequence[float] | None = None
) -> tuple[int, ...]:
    """``ops`` with those that depend on no tangent right before their first use; the others keep their order.

    Of several chains that one op needs, the one with the longest path of ``paths`` goes first (see ``find_paths``), or
    without these, the ops of all of them run in program order. Values in ``available`` are at hand.
    """
    wanted, at_hand = frozenset(ops), frozenset(available)
    order: dict[int, None] = {}
    waiting = {r for op in wanted - graph.tangent_ops for r in graph.ops[op].results} - at_hand

    def producers(values: Iterable[int]) -> list[int]:
        found = (graph.values[v].producer for v in values if v not in at_hand)
        return [p for p in dict.fromkeys(found) if p is not None and p in wanted and p not in order]

    def emit(values: Iterable[int]) -> None:
        if waiting.isdisjoint(values):
            return
        needed: dict[int, None] = {}
        pending = [(p, False) for p in _by_path(producers(values), paths)]
        while pending:
            op, is_ready = pending.pop()
            if is_ready:
                needed[op] = None
            elif op not in needed:
                pending.append((op, True))
                inputs = [p for p in producers(graph.ops[op].operands) if p not in needed]
                pending.extend((p, False) for p in _by_path(inputs, paths))
        order.update(needed if paths is not None else dict.fromkeys(sorted(needed)))
        waiting.difference_update(r for op in needed for r in graph.ops[op].results)

    for number in ops:
        if number in graph.tangent_ops:
            emit(graph.ops[number].operands)
            order[number] = None
    emit(graph.backward_results)
    # Ops that nothing needs, but that do something: where they stood, after the rest.
    order.update(dict.fromkeys(ops))
    return tuple(order)


def _by_path(ops: list[int], paths: Sequence[float] | None) -> list[int]:
    """The longest path last: a stack gives it first."""
    return (ops if paths is None else sorted(ops, key=lambda op: -paths[op]))[::-1]


def find_paths(graph: JointGraph, ops: Iterable[int], available: Collection[int]) -> list[float]:
    """For each of ``ops``, in program order, the seconds of the longest chain of them that ends in it: its critical
    path. 0 for other ops."""
    costs, at_hand, paths = CostModel(), frozenset(available), [0.0] * len(graph.ops)
    for number in sorted(ops):
        inputs = (graph.values[v].producer for v in graph.ops[number].operands if v not in at_hand)
        paths[number] = costs.seconds(graph, number) + max((paths[p] for p in inputs if p is not None), default=0.0)
    return paths


def find_low_schedule(
    graph: JointGraph, ops: Sequence[int], available: Collection[int], *, in_order: bool = False
) -> tuple[int, ...]:
    """The order of a backward's ``ops`` with recomputation sunk to its first uses whose scratch memory is least, and
    ``ops`` as they are where each would need more than they do. ``in_order``: with one kernel at a time.

    Critical paths first, unless program order needs less memory.
    """
    orders = (
        sink_order(graph, ops, available, find_paths(graph, ops, available)),
        sink_order(graph, ops, available),
        tuple(ops),
    )
    return min(orders, key=lambda order: _scratch(graph, order, available, in_order))


def schedule_plan(graph: JointGraph, plan: PartitionPlan, *, in_order: bool = False) -> PartitionPlan:
    """``plan`` with its backward in the order that ``bwd-sink-recompute`` brings it to."""
    kept = [a for a in graph.arguments if a not in graph.mutated]
    order = find_low_schedule(graph, plan.backward, (*kept, *plan.saved), in_order=in_order)
    return dataclasses.replace(plan, backward=order)


def _scratch(graph: JointGraph, ops: tuple[int, ...], available: Collection[int], in_order: bool) -> int:
    formed = find_steps(graph, ops, available, graph.backward_results)
    return compute_scratch(order_kernels(graph, formed, available) if in_order else formed, in_order=in_order)
