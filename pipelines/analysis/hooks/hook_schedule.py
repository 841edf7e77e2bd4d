# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""When hooks run: schedules of a backward's effects, one function per policy.

A schedule is an order of the live tasks of a `HookGraph` that respects its dependencies. What lies between two effects
is one stage: it runs as one compiled function. The policies are those of compiled autograd's ``reorder_*`` and
``delay_*`` passes (``torch/_dynamo/compiled_autograd.py``), as one decision.

All policies share three rules. An unpack hook runs right before the first use of what it gives: earlier costs memory
for nothing. So does the wait for a collective, behind what can be computed meanwhile. Compute runs as late as the
chosen order of effects lets it, so that what it gives is not alive before it is used. And accumulations of small
gradients cut nothing: what the effect after them needs is computed before them, in one stage with the gradients, since
no code of the user's runs in between. After a large gradient there is a cut, but for ``fewest-stages``: a function
holds all that it takes and gives for as long as it runs, so that in one piece a backward would have all saved tensors
and all gradients in memory at a time. In eager order and for overlap there is none either before a bucket is full that
a reducer is told of gradient by gradient: it sends nothing before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Literal

from retrograd.contract.hooks import POST, POST_ACCUMULATE, UNPACK
from retrograd.pipelines.analysis.hooks.hook_graph import ACCUMULATE, UPDATE, WAIT, HookGraph, with_following

Order = tuple[int, ...]
_Key = tuple[float, ...]
# DDP's first bucket, the smallest.
JOINED_BYTES = 1 << 20
# The kinds of hooks that are called when a gradient is there.
_AFTER_SUMS = (POST, POST_ACCUMULATE)
# What runs right before the first use of what it gives.
_LATE = (UNPACK, WAIT)


def find_eager_order(graph: HookGraph) -> Order:
    """Effects in captured order, which is eager's.

    Only unpack hooks move, to behind the last effect before the first use of what they give: capture runs them ahead
    of their node's pre-hooks, eager after. Those of one node keep their order, since nothing else happens between them.
    And so do waits for collectives, which nobody sees.
    """
    fixed = [e for e in graph.effects if graph.kind(e) not in _LATE]

    def due(number: int) -> float:
        before = bisect_left(fixed, _first_use(graph, number, number))
        return number if graph.kind(number) not in _LATE else fixed[before - 1] + 0.5 if before else -1

    return _schedule(graph, {e: (due(e), e) for e in graph.effects}, partial(_fills_bucket, graph))


def find_asap_order(graph: HookGraph) -> Order:
    """Each effect as soon as all that it depends on has run, were compute to run in captured order."""
    ready = _ready_times(graph)
    return _schedule(graph, {e: (_first_use(graph, e, ready[e]), e) for e in graph.effects})


def find_overlap_order(graph: HookGraph) -> Order:
    """Communication starts as early as it can: nothing precedes it but what it needs. All else, as for asap, follows
    while it goes on, and at the end what waits for a collective.

    Small gradients that are sent one after the other are worked out in one stage, up to ``JOINED_BYTES`` of them, where
    buckets are not known: what is sent of them are buckets of more. Their calls keep their order, and nothing is
    computed from what these calls give, since they give nothing.
    """
    ready = _ready_times(graph)
    urgent = _with_ancestors(graph, (e for e in graph.effects if graph.communicates(e)))
    awaited = with_following(graph, (e for e in graph.effects if graph.kind(e) == WAIT))
    keys = {e: (e not in urgent, e in awaited, _first_use(graph, e, ready[e]), e) for e in graph.effects}
    return _schedule(
        graph, keys, lambda group, e: e in urgent and (_fills_bucket(graph, group, e) or _sends_on(graph, group, e))
    )


def find_fewest_stages_order(graph: HookGraph) -> Order:
    """The fewest stages that any schedule has.

    The level of a task is the number of stages that have begun by the time it has run, at the least: for compute, the
    highest of 1, the levels of compute that it depends on, and one more than those of effects that it depends on; for
    an effect, the highest of the levels that it depends on, or 0.

    *No schedule has fewer stages than the highest level.* A chain of dependencies leads to each task of level k on
    which compute follows an effect k - 1 times, after compute at the start; two computes with an effect between them
    are in different stages, so that the computes that begin each group on the chain are in k stages.

    *That many suffice.* Run compute of level 1, effects of level 1, compute of level 2, and so on, effects of level 0
    first, each group in captured order. A dependency never leads to a lower level, and compute that depends on an
    effect has a higher one; so every dependency points forward, and each level is one stage.

    Within that bound compute takes the highest level that its users leave to it, and so do unpack hooks. The levels of
    other effects do not change, and compute never takes a level above the highest. Linear in tasks and dependencies.
    """
    _, latest = find_levels(graph)
    return tuple(sorted(graph.live, key=lambda n: (latest[n], graph.kind(n) is not None, n)))


def find_levels(
    graph: HookGraph, anchors: Collection[int] = (), free: Collection[int] = ()
) -> tuple[dict[int, int], dict[int, int]]:
    """The first and the last level that each live task may have in :func:`find_fewest_stages_order`.

    ``anchors`` are computations that are in a later level than what they depend on, but for ``free`` ones, views and
    constants that may be beside them; they have the first level that this leaves to them.
    """
    earliest, latest = _earliest_levels(graph, anchors, free), dict[int, int]()
    # Of free tasks what the tasks have to keep to that they depend on.
    before: dict[int, int] = {}
    last = max((level for n, level in earliest.items() if graph.kind(n) is None), default=0)
    for number in sorted(graph.live, reverse=True):
        kind, users = graph.kind(number), graph.successors[number]
        if number in anchors:
            latest[number] = earliest[number]
        elif kind is None:
            latest[number] = min((latest[u] for u in users), default=last)
            before[number] = min(
                (latest[u] - 1 if u in anchors else before.get(u, latest[u]) for u in users), default=last
            )
            if number not in free:
                latest[number] = before.pop(number)
        elif kind in _LATE:
            latest[number] = min((latest[u] - (graph.kind(u) is None) for u in users), default=earliest[number])
        else:
            latest[number] = earliest[number]
    return earliest, latest


HookSchedule = Literal["eager-order", "asap", "overlap", "fewest-stages"]
"""The names of the policies, which users give and ``bwd-schedule-hooks`` takes."""

POLICIES: dict[HookSchedule, Callable[[HookGraph], Order]] = {
    "eager-order": find_eager_order,
    "asap": find_asap_order,
    "overlap": find_overlap_order,
    "fewest-stages": find_fewest_stages_order,
}


def find_stages(graph: HookGraph, order: Iterable[int]) -> tuple[Order, ...]:
    """The stages of a schedule: the runs of compute between effects."""
    stages: list[list[int]] = [[]]
    for number in order:
        if graph.kind(number) is None:
            stages[-1].append(number)
        elif stages[-1]:
            stages.append([])
    return tuple(tuple(stage) for stage in stages if stage)


def _schedule(
    graph: HookGraph, keys: Mapping[int, _Key], may_join: Callable[[Sequence[int], int], bool] = lambda group, e: False
) -> Order:
    """Effects by least key among those that could be next; before each group of them the compute that it needs.
    ``may_join`` says whether a group may have the next effect too, where it need not."""
    placed: dict[int, None] = {}
    groups = _group_effects(graph, _order_effects(graph, keys), may_join)
    awaited = with_following(graph, (e for e in graph.effects if graph.kind(e) == WAIT))
    for place, group in enumerate(groups):
        wanted: Iterable[int] = group
        if group is groups[-1] and graph.kind(group[-1]) == ACCUMULATE:
            wanted = graph.live
        needed = _with_ancestors(graph, wanted, without=placed)
        if graph.kind(group[0]) == WAIT:
            is_last = all(awaited.issuperset(later) for later in groups[place:])
            needed |= _computed_meanwhile(graph, graph.live if is_last else graph.successors[group[0]], placed)
        placed.update(dict.fromkeys(sorted(needed.difference(graph.effects))))
        placed.update(dict.fromkeys(group))
    rest = sorted(graph.live.difference(placed))
    return (*placed, *rest)


def _computed_meanwhile(graph: HookGraph, wanted: Iterable[int], placed: Collection[int]) -> set[int]:
    """The computation that can run before a wait: what who takes what is waited for needs besides, or all that can,
    where only what waits is left."""
    found: set[int] = set()
    for number in sorted(_with_ancestors(graph, wanted, without=dict.fromkeys(placed))):
        if graph.kind(number) is None and all(n in found or n in placed for n in graph.dependencies[number]):
            found.add(number)
    return found


def _group_effects(
    graph: HookGraph, order: Iterable[int], may_join: Callable[[Sequence[int], int], bool]
) -> list[list[int]]:
    """Accumulations with the effect that follows them, but for large gradients: no code of the user's runs in between.
    What one hook updates is a group, but for large values; what two update is not: the new values of one are written
    before those of the next exist."""
    groups: list[list[int]] = []
    for effect in order:
        if groups and (
            _goes_on(graph, groups[-1][-1])
            or _updates_together(graph, groups[-1], effect)
            or may_join(groups[-1], effect)
        ):
            groups[-1].append(effect)
        else:
            groups.append([effect])
    return groups


def _goes_on(graph: HookGraph, number: int) -> bool:
    """Whether a group goes on after an effect, whatever comes next."""
    effect = graph.tasks[number].effect
    return effect is not None and effect.kind == ACCUMULATE and not effect.large


def _sends_on(graph: HookGraph, group: Sequence[int], number: int) -> bool:
    """Whether a group is small gradients with the calls that send them, and has room for one more accumulation, of
    another small one."""
    added = graph.tasks[number].effect
    effects = [effect for n in group if (effect := graph.tasks[n].effect) is not None]
    sums, calls = [e for e in effects if e.kind == ACCUMULATE], [e for e in effects if e.kind != ACCUMULATE]
    gives_nothing = not any(graph.tasks[n].gives for n in group)
    small = not any(e.large for e in sums) and sum(e.bytes for e in sums) < JOINED_BYTES
    if added is None or added.kind != ACCUMULATE or added.large or not sums or not small:
        return False
    return gives_nothing and all(e.communication and e.kind in _AFTER_SUMS for e in calls)


def _fills_bucket(graph: HookGraph, group: Sequence[int], number: int) -> bool:
    """Whether an effect is one more step on the way to a full bucket, of which nothing is sent before: a gradient that
    is accumulated, or the call that tells of it."""
    bucket = graph.buckets.get(number)
    if bucket is None or any(graph.buckets.get(n) != bucket for n in group):
        return False
    return not any(graph.tasks[n].gives for n in (*group, number))


def _updates_together(graph: HookGraph, group: Sequence[int], number: int) -> bool:
    """Whether an update is worked out with those of a group: of the same hook, one large value at the most."""
    before, own = [graph.tasks[n].effect for n in group], graph.tasks[number].effect
    if own is None or any(e is None or (e.kind, e.number) != (UPDATE, own.number) for e in before):
        return False
    return own.kind == UPDATE and not (own.large and any(e is not None and e.large for e in before))


def _order_effects(graph: HookGraph, keys: Mapping[int, _Key]) -> list[int]:
    """Kahn's algorithm on effects with a heap: compute is taken as soon as it can be, and has no key."""
    missing = {n: len(graph.dependencies[n]) for n in graph.live}
    able = [n for n, count in missing.items() if count == 0]
    heap: list[tuple[_Key, int]] = []
    order = []
    while able or heap:
        if able:
            number = able.pop()
            if number in keys:
                heappush(heap, (keys[number], number))
                continue
        else:
            _, number = heappop(heap)
            order.append(number)
        for user in graph.successors[number]:
            missing[user] -= 1
            if missing[user] == 0:
                able.append(user)
    return order


def _with_ancestors(graph: HookGraph, tasks: Iterable[int], without: Mapping[int, None] | None = None) -> set[int]:
    """The tasks and all that they depend on, but for what is in ``without`` and what only that depends on."""
    found: set[int] = set()
    pending = list(tasks)
    while pending:
        number = pending.pop()
        if number not in found and (without is None or number not in without):
            found.add(number)
            pending += graph.dependencies[number]
    return found


def _first_use(graph: HookGraph, number: int, otherwise: float) -> float:
    """When an effect is due: for an unpack hook or a wait right before what follows from it, a wait that only the
    caller waits for at the end; for others as told."""
    users = graph.successors[number]
    if graph.kind(number) == WAIT and not users:
        return len(graph.tasks)
    return users[0] - 0.5 if graph.kind(number) in _LATE and users else otherwise


def _ready_times(graph: HookGraph) -> dict[int, int]:
    """For each live task, how far into the captured order it can run: compute at its place there."""
    ready: dict[int, int] = {}
    for number in sorted(graph.live):
        effect = graph.kind(number) is not None
        ready[number] = max((ready[b] for b in graph.dependencies[number]), default=-1) if effect else number
    return ready


def _earliest_levels(graph: HookGraph, anchors: Collection[int] = (), free: Collection[int] = ()) -> dict[int, int]:
    levels: dict[int, int] = {}
    # Of free tasks the level of what they depend on.
    behind: dict[int, int] = {}
    for number in sorted(graph.live):
        needed = graph.dependencies[number]
        if graph.kind(number) is None:
            levels[number] = max((levels[b] + (graph.kind(b) is not None) for b in needed), default=1)
            levels[number] = max(levels[number], 1)
            solid = max((behind.get(b, levels[b]) for b in needed), default=0)
            if number in anchors:
                levels[number] = max(levels[number], solid + 1)
            elif number in free:
                behind[number] = solid
        else:
            levels[number] = max((levels[b] for b in needed), default=0)
    return levels
