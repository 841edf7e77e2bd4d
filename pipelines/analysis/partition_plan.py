# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a partition decides, as data: which values stay alive from forward to backward, which ops run again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from retrograd.pipelines.analysis.graph import JointGraph
from retrograd.pipelines.analysis.op_kinds import OpKind

# Kinds that a backward may hold a second copy of at no arithmetic cost.
_FREE = (OpKind.CONSTANT, OpKind.VIEW)
# Kinds that no plan runs twice.
UNREPEATABLE = (OpKind.RANDOM, OpKind.OPAQUE)


@dataclass(frozen=True)
class PartitionPlan:
    """A decision.

    ``saved``: values kept, in program order; an argument only if the step overwrites it. ``forward``, ``backward``: ops
    of each half, in order. ``recomputed``: ops in both halves that do work (constants and views are not counted).
    """

    policy: str
    saved: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    recomputed: tuple[int, ...]
    saved_bytes: int
    recomputed_flops: int


def plan_from_saved(graph: JointGraph, saved: Iterable[int], policy: str) -> PartitionPlan:
    """The plan that keeps ``saved`` (less what the backward then does not use) and recomputes the rest."""
    wanted = {v for v in saved if graph.values[v].producer is not None} | graph.mutated
    backward = graph.required_ops(graph.backward_results, wanted)
    used = {o for op in backward for o in graph.ops[op].operands} | set(graph.backward_results)
    kept = tuple(v for v in sorted(wanted) if v in used and graph.values[v].producer not in graph.tangent_ops)
    forward = graph.forward_ops | graph.required_ops(kept, ())
    recomputed = tuple(op for op in sorted(backward & forward) if graph.ops[op].kind not in _FREE)
    return PartitionPlan(
        policy=policy,
        saved=kept,
        forward=tuple(sorted(forward)),
        backward=tuple(sorted(backward)),
        recomputed=recomputed,
        saved_bytes=sum(graph.values[v].bytes for v in kept),
        recomputed_flops=sum(graph.ops[op].flops for op in recomputed),
    )


def find_unsavable(graph: JointGraph, plan: PartitionPlan) -> int | None:
    """An op that no legal plan can be made around: the backward needs a value of it that is no tensor, and it cannot
    run there. ``None`` if there is no such op."""
    for value in plan.saved:
        if not graph.values[value].is_tensor:
            return graph.values[value].producer
    twice = set(plan.forward) & set(plan.backward)
    return min((op for op in twice if graph.ops[op].kind in UNREPEATABLE), default=None)


def find_default_partition(graph: JointGraph) -> PartitionPlan:
    """Save as eager autograd does: what the forward computed and the backward uses; of views only what they look at.

    Source: ``torch._functorch.partitioners.default_partition``.
    """
    saved = set()
    pending = list(graph.backward_results)
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        producer = graph.values[value].producer
        if producer is None:
            continue
        kind = graph.ops[producer].kind
        if producer in graph.forward_ops and kind not in _FREE:
            saved.add(value)
        else:
            pending.extend(graph.ops[producer].operands)
    return plan_from_saved(graph, saved, "default")
