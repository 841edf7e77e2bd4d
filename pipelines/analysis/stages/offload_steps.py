# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Plans of stages between which residuals go to the host's memory and come back.

A copy runs beside the compiled stage that follows, and is waited for behind it: so long the device has both. What a
forward gives leaves when the stage has run that is behind the step that gives it, or its last use; what a backward
takes is there from the stage in front of its first use on. (Of ops that run in torch between two stages most are short:
where copies ran beside these, GPT-2's step took as long as all of it one after another.) A function in one piece is a
plan of one step: what it gives leaves behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from retrograd.contract.plan import (
    FinishFetch,
    FinishOffload,
    Free,
    RunStage,
    StagePlan,
    StartFetch,
    StartOffload,
    Step,
    gives,
    join_frees,
    uses,
)


def host_name(value: str) -> str:
    """Names the copy of ``value`` on the host."""
    return f"{value} (host)"


def find_movable(plan: StagePlan, values: Collection[str]) -> frozenset[str]:
    """Those of ``values`` that steps of a forward's plan give, and that are one of its results and no other."""
    counts = Counter(plan.results)
    made = {value for step in plan.steps for value in gives(step)}
    return frozenset(value for value in values if counts[value] == 1 and value in made)


def find_at_turn(forward: StagePlan, backward: StagePlan) -> tuple[frozenset[str], frozenset[str]]:
    """Finds the values that the last step of a forward gives, and those that the first step of its backward takes: a
    residual that is both would come back as soon as it has left. None, where a half is in one piece."""
    halves = [[step for step in plan.steps if not isinstance(step, Free)] for plan in (forward, backward)]
    if min(map(len, halves)) < 2:
        return frozenset(), frozenset()
    return frozenset(gives(halves[0][-1])), frozenset(uses(halves[1][0]))


def offload_results(plan: StagePlan, moved: Collection[str]) -> StagePlan:
    """A forward's plan whose results ``moved``, all of them movable, are on the host."""
    joined = join_frees(plan.steps)
    last: dict[str, int] = {}
    for place, (step, _) in enumerate(joined):
        last |= dict.fromkeys(uses(step), place)
    starts: dict[int, list[str]] = {}
    ends: dict[int, list[str]] = {}
    for place, (step, _) in enumerate(joined):
        for value in [value for value in gives(step) if value in moved]:
            starts.setdefault(place, []).append(value)
            following = next((n for n in range(place + 1, len(joined)) if _is_stage(joined[n][0])), len(joined) - 1)
            ends.setdefault(max(last.get(value, place), following), []).append(value)
    steps: list[Step] = []
    for place, (step, freed) in enumerate(joined):
        steps.append(step)
        if freed:
            # Next to the step: it may work in what nobody has after it.
            steps.append(Free(tuple(freed)))
        if place in starts:
            steps.append(StartOffload(tuple(starts[place]), tuple(map(host_name, starts[place]))))
        if place in ends:
            steps.append(FinishOffload(tuple(ends[place])))
    results = tuple(host_name(value) if value in moved else value for value in plan.results)
    return StagePlan(plan.arguments, tuple(steps), results)


def fetch_arguments(plan: StagePlan, moved: Mapping[str, int]) -> StagePlan:
    """A backward's plan whose arguments ``moved``, of so many bytes each, are on the host; those that no step takes are
    left there."""
    first: dict[str, int] = {}
    for place, step in enumerate(plan.steps):
        for value in uses(step):
            first.setdefault(value, place)
    preceding = _find_preceding(plan.steps)
    starts: dict[int, list[str]] = {}
    ends: dict[int, list[str]] = {}
    fetched = sorted((first[value], value) for value in moved if value in first)
    for place, value in fetched:
        starts.setdefault(preceding[place], []).append(value)
        ends.setdefault(place, []).append(value)
    steps: list[Step] = []
    for place, step in enumerate(plan.steps):
        # What this step takes first: nothing that is to be there later is in its way.
        late = [value for value in starts.get(place, ()) if first[value] == place]
        steps += _fetch(late, moved)
        if place in ends:
            steps.append(FinishFetch(tuple(ends[place])))
        steps += _fetch([value for value in starts.get(place, ()) if first[value] > place], moved)
        steps.append(step)
    taken = {value for _, value in fetched}
    arguments = tuple(host_name(value) if value in taken else value for value in plan.arguments)
    return StagePlan(arguments, tuple(steps), plan.results)


def _fetch(values: Sequence[str], moved: Mapping[str, int]) -> list[Step]:
    if not values:
        return []
    hosts = tuple(map(host_name, values))
    return [StartFetch(hosts, tuple(values), tuple(moved[value] for value in values)), Free(hosts)]


def _find_preceding(steps: Sequence[Step]) -> list[int]:
    """For each step the last stage in front of it; without one, the first step that does more than to free."""
    found = list(range(len(steps)))
    first = next((place for place, step in enumerate(steps) if not isinstance(step, Free)), 0)
    preceding: int | None = None
    for place, step in enumerate(steps):
        found[place] = min(first, place) if preceding is None else preceding
        if _is_stage(step):
            preceding = place
    return found


def _is_stage(step: Step) -> bool:
    return isinstance(step, RunStage)
