# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""When the backward of a plan runs what it recomputes."""

from __future__ import annotations

import dataclasses

from retrograd.pipelines.analysis.graph import JointGraph
from retrograd.pipelines.analysis.partition_plan import PartitionPlan


def sink_recomputation(graph: JointGraph, plan: PartitionPlan) -> PartitionPlan:
    """``plan`` with each recomputed op right before its first use in the backward, in place of at its beginning, where
    what it gives would be alive for as long as if it had been saved."""
    backward, saved = frozenset(plan.backward), frozenset(plan.saved)
    order: dict[int, None] = {}

    def emit(wanted: list[int]) -> None:
        """Append what gives ``wanted`` and has not run yet, in program order."""
        needed: set[int] = set()
        pending = list(wanted)
        while pending:
            value = pending.pop()
            producer = graph.values[value].producer
            if value in saved or producer is None or producer in order or producer in needed:
                continue
            needed.add(producer)
            pending.extend(graph.ops[producer].operands)
        order.update(dict.fromkeys(sorted(needed & backward)))

    for number in plan.backward:
        if number in graph.tangent_ops:
            emit(list(graph.ops[number].operands))
            order[number] = None
    emit(list(graph.backward_results))
    return dataclasses.replace(plan, backward=tuple(order))
