# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which ops the backward must not run again: the heuristics of the min-cut, one function each.

Source: ``torch._functorch.partitioners.solve_min_cut`` and its helpers.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from retrograd.contract.attributes import Tag
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph, Op
from retrograd.pipelines.analysis.partition.op_kinds import OpKind
from retrograd.pipelines.analysis.partition.partition_plan import UNREPEATABLE

_FUSIBLE = (OpKind.POINTWISE, OpKind.VIEW, OpKind.DATA_MOVEMENT, OpKind.REDUCTION, OpKind.CONSTANT)
_CONCATENATION = "torch.aten.cat"
# The distance to the backward of what it does not use.
_NEVER = 10**9


@dataclass(frozen=True)
class MinCutOptions:
    """Heuristics on top of the minimum cut, which alone would recompute all that saves a byte.

    Random and unknown ops have no switch: to run them twice could give other values. Nor has the flattening of tuples:
    each result is a value of its own, that is saved by itself.

    ban_compute: matrix products and convolutions are not recomputed; that takes more time than their bytes take to
        write and read. (``is_compute_intensive``)
    ban_scatter: nor are scatters, which are slow and written to memory in any case; PyTorch's list of what may be
        recomputed leaves them out as well. (``ban_if_not_in_allowlist``)
    ban_reductions: an op whose results are more than ``reduction_ratio`` times smaller than its operands is not
        recomputed: they are cheap to keep, and a second run would read all of its operands. (``ban_if_reduction``)
    ban_materialized: nor is what an op of the backward takes that does not fuse: it would be written to memory there,
        so that recomputing it saves no traffic. (``ban_if_materialized_backward``)
    ban_far_apart: of an op's users those beyond the first op that does not fuse are not recomputed: no one kernel would
        recompute both, so that the op would run once for each. (``ban_if_used_far_apart``)
    ban_long_chains: a chain of fusible ops is cut every ``max_chain`` ops; else what is added up from layer to layer
        would be recomputed from the model's beginning. (``ban_if_long_fusible_chains``)
    max_backward_distance: what is more than so many ops in front of the backward is not recomputed: it would be alive
        for long, or need much to run before it. (``max_dist_from_bw``)
    free_arguments: parameters and inputs cost nothing to save: whoever calls keeps them alive.
        (``treat_parameters_as_free_to_save``, and inputs, which are alive as well)
    save_views: a view may be saved in place of what it looks at, if that is larger. Where not, only the latter is, as
        views cost nothing to run again. (``recompute_views``)
    distance_base: a value weighs this factor more with every op between it and the backward, for at most
        ``max_distance`` of them: of cuts of equal bytes the one nearest to the backward recomputes least.
    fused_weight: a value that the forward would not write to memory unless it were saved weighs this factor more: it
        is written as well as read.
    """

    ban_compute: bool = True
    ban_scatter: bool = True
    ban_reductions: bool = True
    reduction_ratio: int = 4
    ban_materialized: bool = True
    ban_far_apart: bool = True
    ban_long_chains: bool = True
    max_chain: int = 100
    max_backward_distance: int = 1000
    free_arguments: bool = True
    save_views: bool = True
    distance_base: float = 1.1
    max_distance: int = 100
    fused_weight: float = 2.0


def find_banned(graph: JointGraph, options: MinCutOptions) -> frozenset[int]:
    """Ops that the backward must not run: of the forward, and what must not run twice wherever it is. What the user
    asked to be recomputed never is, what the user asked not to be always."""
    tagged = {op.id for op in graph.ops if op.tag is not None}
    avoided = {number for number in tagged if graph.ops[number].tag in (Tag.AVOID, Tag.NEVER)}
    banned = {op.id for op in graph.ops if _is_banned_kind(op, options)}
    if options.ban_reductions:
        banned |= {op.id for op in graph.ops if _shrinks(graph, op, options.reduction_ratio)}
    if options.ban_materialized:
        banned |= find_materialized(graph)
    distances = find_distances(graph)
    banned |= {op.id for op in graph.ops if options.max_backward_distance < distances[op.id] < _NEVER}
    banned = _without_views(graph, (banned - tagged) | avoided)
    if options.ban_far_apart:
        banned |= find_far_apart(graph) - tagged
    if options.ban_long_chains:
        banned |= find_chain_breaks(graph, banned, options.max_chain) - tagged
    repeated = graph.forward_ops - graph.tangent_ops
    # An op that only the backward needs runs once in either half, but a part of its results must not come from each.
    unrepeatable = {op.id for op in graph.ops if op.kind in UNREPEATABLE and op.id not in graph.tangent_ops}
    return frozenset(op for op in banned & (repeated | unrepeatable) if graph.ops[op].kind is not OpKind.CONSTANT)


def is_fusible(graph: JointGraph, producer: int, user: int) -> bool:
    """Whether ``user`` can run in one kernel with ``producer``, of whose results it takes one. A concatenation can take
    what fuses and what does not, but nothing reads it before all of it is there."""
    given, taken = graph.ops[producer], graph.ops[user]
    if taken.name == _CONCATENATION:
        return True
    return given.kind in _FUSIBLE and taken.kind in _FUSIBLE and given.name != _CONCATENATION


def _is_banned_kind(op: Op, options: MinCutOptions) -> bool:
    match op.kind:
        case OpKind.COMPUTE:
            return options.ban_compute
        case OpKind.SCATTER:
            return options.ban_scatter
    return op.kind in UNREPEATABLE


def _without_views(graph: JointGraph, ops: set[int]) -> set[int]:
    return {op for op in ops if graph.ops[op].kind is not OpKind.VIEW}


def _shrinks(graph: JointGraph, op: Op, ratio: int) -> bool:
    if op.kind is OpKind.CONSTANT:
        return False
    taken = sum(graph.values[v].bytes for v in dict.fromkeys(op.operands))
    given = sum(graph.values[v].bytes for v in op.results)
    return 0 < given * ratio < taken


def find_materialized(graph: JointGraph) -> set[int]:
    """Fusible ops of the forward whose result an op of the backward that does not fuse takes, directly or through views
    and lists."""
    found: set[int] = set()
    for number in graph.backward_ops - graph.forward_ops:
        for value in graph.reads[number]:
            producer = graph.values[value].producer
            if producer is None or producer not in graph.forward_ops or graph.ops[producer].kind not in _FUSIBLE:
                continue
            if not is_fusible(graph, producer, number):
                found.add(producer)
    return found


def _forward_users(graph: JointGraph) -> dict[int, list[int]]:
    """For each op of the forward, but literals, the ops of the forward that take a result of it, in order."""
    ops = [n for n in sorted(graph.forward_ops) if graph.ops[n].kind is not OpKind.CONSTANT or graph.ops[n].operands]
    known = set(ops)
    return {n: sorted({u for r in graph.ops[n].results for u in graph.users[r] if u in known}) for n in ops}


def find_far_apart(graph: JointGraph) -> set[int]:
    """Fusible users of an op of the forward that come after the first op that does not fuse, of those it leads to."""
    users = _forward_users(graph)
    found: set[int] = set()
    for number, near in users.items():
        if len(near) > 1:
            first = _find_first_unfusible(graph, users, near)
            found.update(u for u in near if u > first and is_fusible(graph, number, u))
    return _without_views(graph, found)


def _find_first_unfusible(graph: JointGraph, users: dict[int, list[int]], near: list[int]) -> int:
    """The first op that does not fuse with what it takes, on the ways from the ops of ``near`` to the last of them."""
    pending = [(op, True) for op in near]
    seen = set(pending)
    while pending:
        op, fuses = heapq.heappop(pending)
        if not fuses:
            return op
        for user in users.get(op, ()):
            link = (user, is_fusible(graph, op, user))
            if user <= near[-1] and link not in seen:
                seen.add(link)
                heapq.heappush(pending, link)
    return near[-1]


def find_chain_breaks(graph: JointGraph, banned: set[int], longest: int) -> set[int]:
    """Where chains of fusible ops of the forward are cut: more than ``longest`` ops from their beginning, at a place
    that all of the chain runs through."""
    users = _forward_users(graph)
    place = {op: i for i, op in enumerate(users)}
    found: set[int] = set()
    seen: set[int] = set()
    for start in users:
        if start in seen:
            continue
        seen.add(start)
        pending = [start]
        while pending:
            op = heapq.heappop(pending)
            if place[op] > place[start] + longest and not pending:
                found.add(op)
                break
            for user in users[op]:
                if user not in banned and user not in seen and is_fusible(graph, op, user):
                    seen.add(user)
                    heapq.heappush(pending, user)
    return _without_views(graph, found)


def find_distances(graph: JointGraph) -> list[int]:
    """For each op the number of steps to the backward: to an op that the forward does not need (0 for those
    themselves), or to being a gradient."""
    distances = [0 if op.id not in graph.forward_ops else _NEVER for op in graph.ops]
    gradients = set(graph.backward_results)
    for op in reversed(graph.ops):
        if op.id in graph.forward_ops:
            users = [distances[u] + 1 for r in op.results for u in graph.users[r] if u in graph.backward_ops]
            distances[op.id] = min([*users, _NEVER, *([1] if gradients.intersection(op.results) else [])])
    return distances
