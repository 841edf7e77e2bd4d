# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Holds a partition's decisions as data: which values stay alive from forward to backward, which ops run again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from retrograd.contract.attributes import Tag
from retrograd.contract.partitions import DEFAULT
from retrograd.pipelines.analysis.partition.decisions import find_torn
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.op_kinds import OpKind

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
    """The plan that keeps ``saved`` (less what the backward then does not use) and recomputes the rest.

    Whatever the policy, what the user said must be recomputed or saved is, as far as the forward computes it; and no
    value is compared with one that was chosen of it before it was computed again.
    """
    must = {r for op in graph.tagged_ops[Tag.MUST] for r in op.results}
    made = {v for v in saved if graph.values[v].producer is not None}
    return _plan(graph, (made - must) | _kept_results(graph, graph.forward_ops) | graph.mutated, policy)


def _plan(graph: JointGraph, wanted: set[int], policy: str) -> PartitionPlan:
    backward = graph.late_ops | graph.required_ops(graph.early_needs, wanted)
    used = {o for op in backward for o in graph.ops[op].operands} | set(graph.backward_results)
    kept = tuple(v for v in sorted(wanted) if v in used and graph.values[v].producer not in graph.tangent_ops)
    forward = graph.forward_ops | graph.required_ops((v for v in kept if v not in graph.forward_values), ())
    if not _kept_results(graph, forward) <= wanted:
        # What is kept made the forward compute more; it computes no more for keeping results of that.
        return _plan(graph, wanted | _kept_results(graph, forward), policy)
    if torn := find_torn(graph, kept, backward):
        return _plan(graph, wanted | torn, policy)
    recomputed = tuple(op for op in sorted(backward & forward) if graph.ops[op].kind not in _FREE)
    return PartitionPlan(
        policy=policy,
        saved=kept,
        forward=tuple(sorted(forward)),
        backward=tuple(sorted(backward)),
        recomputed=recomputed,
        saved_bytes=sum(graph.values[v].saved_bytes for v in kept),
        recomputed_flops=sum(graph.ops[op].flops for op in recomputed),
    )


def _kept_results(graph: JointGraph, ops: frozenset[int]) -> set[int]:
    """Tensors among the results of those of ``ops`` that the user said must not run again."""
    results = (r for op in graph.tagged_ops[Tag.NEVER] if op.id in ops for r in op.results)
    return {r for r in results if graph.values[r].is_tensor}


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
    What the user asked to be recomputed is, from what is saved in front of it.

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
        op = graph.ops[producer]
        recomputed = op.tag is not None and op.tag.recomputes
        if producer in graph.forward_ops and op.kind not in _FREE and not recomputed:
            saved.add(value)
        else:
            pending.extend(graph.ops[producer].operands)
    return plan_from_saved(graph, saved, DEFAULT)
