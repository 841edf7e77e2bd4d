# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which reductions are joined, and which gatherings start earlier, as plain data.

Both change in which order a process starts collectives, alike in every process that runs the same code. What else
starts communication, a hook or a custom function, is code of the user's: nothing is moved across it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from retrograd.pipelines.analysis.hooks.hook_graph import COLLECTIVE, HookGraph, Task, find_following
from retrograd.pipelines.analysis.hooks.hook_schedule import Order


@dataclass(frozen=True)
class Bucket:
    """Starts that become one, in captured order, and the bytes that they give."""

    tasks: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Move:
    """A gathering that starts before ``stage``, the first task of the stage that it was behind, with what is computed
    for it alone; and the bytes that it gives."""

    task: int
    stage: int
    computed: tuple[int, ...]
    bytes: int


def without_chain(graph: HookGraph) -> HookGraph:
    """The graph in which collectives keep no order among themselves but that of what they take."""
    tasks = tuple(
        replace(task, effect=replace(task.effect, communication=False))
        if task.effect is not None and task.effect.kind == COLLECTIVE
        else task
        for task in graph.tasks
    )
    return HookGraph(tasks, graph.results)


def find_buckets(graph: HookGraph, kinds: Mapping[int, Hashable], limit: int, first: int) -> tuple[Bucket, ...]:
    """The reductions that are joined, two or more each. ``kinds`` has the starts that may be, with what has to be the
    same of two that are joined.

    Buckets are filled in captured order, up to ``limit`` bytes, the first one of its kind up to ``first``; one that is
    larger by itself stays alone. Those of one bucket do not depend on each other, and no other code that starts
    communication runs between them.
    """
    loose = without_chain(graph)
    opened: dict[Hashable, list[int]] = {}
    counts: dict[Hashable, int] = {}
    buckets: list[list[int]] = []
    following: dict[Hashable, set[int]] = {}
    for number in graph.effects:
        effect = graph.tasks[number].effect
        assert effect is not None
        if number not in kinds:
            if effect.communication and effect.kind != COLLECTIVE:
                opened.clear()
            continue
        kind = kinds[number]
        bucket = opened.get(kind)
        most = min(first, limit) if counts.get(kind, 1) == 1 else limit
        if bucket is None or given_bytes(graph, [*bucket, number]) > most or number in following[kind]:
            bucket = opened[kind] = []
            following[kind] = set()
            buckets.append(bucket)
            counts[kind] = counts.get(kind, 0) + 1
        bucket.append(number)
        following[kind] |= find_following(loose, [number])
    return tuple(Bucket(tuple(b), given_bytes(graph, b)) for b in buckets if len(b) > 1)


def order_joined(graph: HookGraph, bucket: Bucket) -> Order:
    """Live tasks in an order in which the starts of a bucket stand beside each other, at the place of the last one:
    what depends on them, and was before that, comes right behind."""
    last = max(bucket.tasks)
    late = {n for n in find_following(without_chain(graph), bucket.tasks) if n < last}
    live = sorted(graph.live)
    before = [n for n in live if n < last and n not in late and n not in bucket.tasks]
    return (*before, *bucket.tasks, *sorted(late), *(n for n in live if n > last))


def find_moves(graph: HookGraph, gatherings: Iterable[int], limit: int) -> tuple[tuple[Move, ...], Order]:
    """The gatherings that start one stage earlier, and the tasks in the order that this gives. The graph is in the
    order of its schedule.

    A gathering passes the effects in front of it and one run of computation, if it needs nothing of these but what is
    computed, which goes with it; it passes no call of code that starts communication itself. ``limit`` are the bytes
    of what is gathered early that may be alive at a time: what would exceed them stays.
    """
    loose = without_chain(graph)
    order = sorted(graph.live)
    moves: list[Move] = []
    early: dict[int, int] = {}
    for number in sorted(gatherings):
        found = _find_move(loose, graph, order, number)
        if found is None:
            continue
        stage, computed, passed = found
        size = given_bytes(graph, [number])
        alive = {task: early.get(task, 0) + size for task in passed}
        if max(alive.values()) > limit:
            continue
        early |= alive
        moving = {*computed, number}
        rest = [n for n in order if n not in moving]
        place = rest.index(stage)
        order = [*rest[:place], *computed, number, *rest[place:]]
        moves.append(Move(number, stage, computed, size))
    return tuple(moves), tuple(order)


def _find_move(
    loose: HookGraph, graph: HookGraph, order: Sequence[int], number: int
) -> tuple[int, tuple[int, ...], list[int]] | None:
    """Before which task of the order a gathering can start, with what is computed for it, and what it passes."""
    own, given = _find_own(loose, number)
    place = start = order.index(number)
    passed: list[int] = []
    computes = False
    while start:
        task = order[start - 1]
        is_effect = graph.kind(task) is not None
        # What it takes, and the end of the stage.
        if task in given or (computes and is_effect) or _calls(graph.tasks[task]):
            break
        start -= 1
        if task not in own:
            passed.insert(0, task)
            computes = computes or not is_effect
    if not computes:
        return None
    return passed[0], tuple(n for n in order[start:place] if n in own), passed


def _find_own(loose: HookGraph, number: int) -> tuple[set[int], set[int]]:
    """The computation that a task needs, and the effects that this, or the task, needs."""
    own, given = set[int](), set[int]()
    pending = [*loose.dependencies[number]]
    while pending:
        task = pending.pop()
        if loose.kind(task) is not None:
            given.add(task)
        elif task not in own:
            own.add(task)
            pending += loose.dependencies[task]
    return own, given


def _calls(task: Task) -> bool:
    """Whether a task is code of the user's that starts communication."""
    return task.effect is not None and task.effect.communication and task.effect.kind != COLLECTIVE


def given_bytes(graph: HookGraph, tasks: Iterable[int]) -> int:
    """The bytes that the effects of these tasks give."""
    effects = (graph.tasks[n].effect for n in tasks)
    return sum(effect.bytes for effect in effects if effect is not None)
