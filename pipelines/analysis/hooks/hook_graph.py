# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A backward with effects as plain data: what hook scheduling decides on, with no MLIR in sight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from retrograd.contract.hooks import POST, POST_ACCUMULATE, UNPACK

ACCUMULATE = "accumulate_grad"
CALL_BACKWARD = "call_backward"
FINAL_CALLBACKS = "final_callbacks"
ISLAND = "island"
UPDATE = "update_input"
COLLECTIVE = "start_collective"
WAIT = "wait_collective"


# Those that write to nothing that they take.
_LOOKING = (None, UNPACK, ISLAND, COLLECTIVE, WAIT)


@dataclass(frozen=True)
class Effect:
    """A task's effect besides computing: a hook of some kind, an accumulation, a custom backward, the final callbacks,
    an update of an input by an inlined hook, an island, or the start of a collective or the wait for one.

    Attributes:
        kind: one of those above.
        number: the hook's, the parameter's, the function's or the island's.
        communication: the hook or custom backward starts something that goes on while other work is done.
        random: the island draws random numbers.
        large: an update's new value, or an accumulation's gradient, is worth a stage of its own, to be in memory no
            longer than it must.
        bytes: those of an accumulation's gradient, and of what a collective gives.
        bucket: the bucket of which a hook says that a gradient is there; it is sent when all are.
    """

    kind: str
    number: int = 0
    communication: bool = False
    random: bool = False
    large: bool = False
    bytes: int = 0
    bucket: int | None = None


@dataclass(frozen=True)
class Task:
    """An op that takes and gives tensors, by number: compute, unless it has an effect."""

    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    effect: Effect | None = None


@dataclass(frozen=True)
class HookGraph:
    """Tasks in the order in which they were captured, and the values that are returned. Values that no task gives are
    arguments, which are always there."""

    tasks: tuple[Task, ...]
    results: tuple[int, ...] = ()

    @cached_property
    def producers(self) -> Mapping[int, int]:
        """The task that gives each value; arguments are left out."""
        return {value: number for number, task in enumerate(self.tasks) for value in task.gives}

    @cached_property
    def effects(self) -> tuple[int, ...]:
        """The tasks with an effect, in order."""
        return tuple(number for number, task in enumerate(self.tasks) if task.effect is not None)

    @cached_property
    def live(self) -> frozenset[int]:
        """The tasks that must run: effects, and what they and the results need."""
        pending = [*self.effects, *(self.producers[r] for r in self.results if r in self.producers)]
        live: set[int] = set()
        while pending:
            number = pending.pop()
            if number not in live:
                live.add(number)
                pending += [self.producers[v] for v in self.tasks[number].takes if v in self.producers]
        return frozenset(live)

    @cached_property
    def needed(self) -> frozenset[int]:
        """The values that live tasks take, or that are returned."""
        return frozenset(self.results).union(*(self.tasks[number].takes for number in self.live))

    @cached_property
    def dependencies(self) -> tuple[frozenset[int], ...]:
        """For each live task the tasks that come before it in any schedule.

        Besides the tasks that give what it takes, of effects:

        - hooks, accumulations and custom backwards that take a value of its, in captured order (hooks of one tensor or
          node in the order of their registration); unpack hooks apart, which take what nobody else looks at;
        - custom backwards among themselves, since what they share is unknown;
        - accumulations into one parameter, each with its post-accumulate hooks, which look at the parameter;
        - a post-accumulate hook follows its accumulation, the nearest before it, and such hooks keep their order;
        - a post hook follows whatever was captured before it and takes a value of its: all that the node took is
          consumed; where that is an accumulation, its post-accumulate hooks too;
        - an update of an input follows whatever was captured before it and takes the input or a view of it, though not
          what takes the new value;
        - a wait, besides what it waits for, nothing; what may write to a value that a collective was started on, any
          effect captured after the wait that takes the value, follows the wait;
        - islands that draw random numbers, among themselves; other islands are compute that happens to run in torch;
        - what starts communication, among itself: each process is to start the same in the same order, whatever its
          schedule, and one that runs eagerly has the captured order;
        - a custom backward that starts communication follows all accumulations captured before it: what it sends are
          gradients that it finds in ``.grad``, such as FSDP's of one block;
        - final callbacks follow everything captured before them, and effects captured after them follow them.
        """
        return tuple(
            frozenset(self._data_dependencies(n) | self._effect_dependencies(n)) if n in self.live else frozenset()
            for n in range(len(self.tasks))
        )

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each task those that have it among their `dependencies`, in order."""
        successors: list[list[int]] = [[] for _ in self.tasks]
        for number, needed in enumerate(self.dependencies):
            for before in needed:
                successors[before].append(number)
        return tuple(map(tuple, successors))

    @cached_property
    def buckets(self) -> Mapping[int, int]:
        """The bucket of each hook that fills one, and of the accumulation that it follows."""
        found: dict[int, int] = {}
        for number in self.effects:
            effect, taken = self.tasks[number].effect, set(self.tasks[number].takes)
            if effect is None or effect.bucket is None:
                continue
            found[number] = effect.bucket
            for before in self.dependencies[number]:
                if self.kind(before) == ACCUMULATE and not taken.isdisjoint(self.tasks[before].takes):
                    found[before] = effect.bucket
        return found

    @cached_property
    def owners(self) -> Mapping[int, int]:
        """The accumulation that each post-accumulate hook belongs to: the nearest before it, if there is one."""
        owners: dict[int, int] = {}
        last: int | None = None
        for number in self.effects:
            if self.kind(number) == ACCUMULATE:
                last = number
            elif self.kind(number) == POST_ACCUMULATE and last is not None:
                owners[number] = last
        return owners

    def kind(self, number: int) -> str | None:
        """The kind of a task's effect; None for compute."""
        effect = self.tasks[number].effect
        return None if effect is None else effect.kind

    @cached_property
    def takers(self) -> Mapping[int, tuple[int, ...]]:
        """The live tasks that take each value, in order."""
        takers: dict[int, list[int]] = {}
        for number in sorted(self.live):
            for value in dict.fromkeys(self.tasks[number].takes):
                takers.setdefault(value, []).append(number)
        return {value: tuple(numbers) for value, numbers in takers.items()}

    @cached_property
    def _hooks_of(self) -> Mapping[int, tuple[int, ...]]:
        """The post-accumulate hooks of each accumulation, in order."""
        hooks: dict[int, list[int]] = {}
        for hook, owner in self.owners.items():
            hooks.setdefault(owner, []).append(hook)
        return {owner: tuple(numbers) for owner, numbers in hooks.items()}

    def _draws(self, number: int) -> bool:
        effect = self.tasks[number].effect
        return effect is not None and effect.random

    def communicates(self, number: int) -> bool:
        """Whether a task starts communication."""
        effect = self.tasks[number].effect
        return effect is not None and effect.communication

    def _accumulations_into(self, param: int) -> Iterator[int]:
        for number in self.effects:
            effect = self.tasks[number].effect
            if effect is not None and effect.kind == ACCUMULATE and effect.number == param:
                yield number

    def _data_dependencies(self, number: int) -> set[int]:
        return {self.producers[v] for v in self.tasks[number].takes if v in self.producers}

    def _effect_dependencies(self, number: int) -> set[int]:
        """Find the tasks that come before one because of its effect, not because of the values that it takes."""
        task = self.tasks[number]
        if task.effect is None:
            return set()
        kind = task.effect.kind
        if kind == ISLAND:
            return {e for e in self.effects if e < number and task.effect.random and self._draws(e)}
        if kind == WAIT:
            return {e for e in self.effects if e < number and self.kind(e) == FINAL_CALLBACKS}
        sharing = {n for v in task.takes for n in self.takers[v]}
        needed = {e for e in self.effects if self.kind(e) == FINAL_CALLBACKS}
        if kind != UNPACK:
            needed |= {n for n in sharing if self.kind(n) not in _LOOKING}
            if kind != COLLECTIVE:
                started = {n for n in sharing if self.kind(n) == COLLECTIVE}
                needed |= {w for n in started for v in self.tasks[n].gives for w in self.takers.get(v, ())}
        if task.effect.communication:
            sent = {ACCUMULATE} if kind == CALL_BACKWARD else set[str]()
            needed |= {e for e in self.effects if self.communicates(e) or self.kind(e) in sent}
        if kind == CALL_BACKWARD:
            needed |= {e for e in self.effects if self.kind(e) == CALL_BACKWARD}
        elif kind == ACCUMULATE:
            same = set(self._accumulations_into(task.effect.number))
            needed |= same.union(*(self._hooks_of.get(a, ()) for a in same))
        elif kind == POST_ACCUMULATE and number in self.owners:
            owner = self.owners[number]
            needed |= {owner, *self._hooks_of[owner]}
        elif kind == POST:
            needed |= sharing.union(*(self._hooks_of.get(n, ()) for n in sharing))
        elif kind == UPDATE:
            # Whoever takes the new value may as well read it where it was written.
            target, _, *views = task.takes
            needed |= {n for v in (target, *views) for n in self.takers[v]}
        elif kind == FINAL_CALLBACKS:
            needed |= self.live
        return {n for n in needed if n < number}


def find_following(graph: HookGraph, tasks: Iterable[int]) -> set[int]:
    """Find the tasks that depend on any of these, directly or not."""
    found: set[int] = set()
    pending = [user for task in tasks for user in graph.successors[task]]
    while pending:
        number = pending.pop()
        if number not in found:
            found.add(number)
            pending += graph.successors[number]
    return found


def with_following(graph: HookGraph, tasks: Iterable[int]) -> set[int]:
    """The tasks and all that depends on them."""
    wanted = set(tasks)
    return wanted | find_following(graph, wanted)
