# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which stage computes what, where islands leave a choice: the fewest bytes go from each stage to the next.

The levels that a computation may have are those of :func:`hook_schedule.find_levels`; each level is a stage. What has
run when level k is done is a set of tasks that has all that its members depend on. The bytes alive then, what the set
gives and somebody outside of it takes, what it gives that is returned, and arguments that somebody outside takes, are
a cut of a flow network; so the fewest are found for each k (Picard, "Maximal closure of a graph and applications to
combinatorial problems", 1976). What has to be in the set only grows with k, and what must not be only shrinks, so that
the smallest of the best sets grow too: all borders have their fewest bytes at once. (What is fixed, see
:func:`find_lean_stages`, is left out of this: a border may have more for it.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from retrograd.pipelines.analysis.hooks.hook_graph import HookGraph
from retrograd.pipelines.analysis.hooks.hook_schedule import Order, find_levels
from retrograd.pipelines.analysis.partition.min_cut import find_source_side

# Sums of infinite capacities stay below 2**63.
_INFINITE = 2**45
# Products that are tried, the largest, and cuts that are made, at the most: each takes a placement.
_CANDIDATES, _MOST_CUTS = 3, 4


@dataclass(frozen=True)
class Stages:
    """Live tasks in order, as runs: each a stage of computation, or the effects between two."""

    runs: tuple[Order, ...]
    levels: Mapping[int, int]

    @staticmethod
    def of(graph: HookGraph, levels: Mapping[int, int]) -> Stages:
        """Computation of each level, and behind it the effects of that level."""
        found: dict[tuple[int, bool], list[int]] = {}
        for number in sorted(graph.live):
            found.setdefault((levels[number], graph.kind(number) is not None), []).append(number)
        return Stages(tuple(tuple(found[key]) for key in sorted(found)), levels)


def find_lean_stages(
    graph: HookGraph,
    sizes: Sequence[int],
    products: Mapping[int, int],
    measure: Callable[[Sequence[Order]], Sequence[int]],
    *,
    free: Collection[int] = (),
    fixed: Collection[int] = (),
    gain: int = 0,
) -> Stages:
    """Stages between which the fewest bytes are alive; as few as there can be, and one more where that lowers the
    highest of their peaks by ``gain`` bytes or more.

    ``sizes`` are the bytes of each value, or what else it costs, by number: of an argument those that are free after
    its last use, so 0 for what its owner keeps. Of stages that are as good, computation takes the latest. A stage is
    cut in front of one of ``products``, which have their operands in memory in any case; by task, the bytes of these.
    ``measure`` gives the peak of each run, ``free`` are views and constants, ``fixed`` what is computed no earlier than
    its users need it.
    """
    anchors: frozenset[int] = frozenset()
    best = Stages.of(graph, place_lean(graph, sizes, fixed=fixed))
    if not products:
        return best
    peaks = measure(best.runs)
    while len(anchors) < _MOST_CUTS:
        highest = max(peaks, default=0)
        stage = best.runs[peaks.index(highest)] if peaks else ()
        large = sorted((n for n in stage if n in products and n not in anchors), key=lambda n: -products[n])
        tried = []
        for number in large[:_CANDIDATES]:
            other = Stages.of(graph, place_lean(graph, sizes, anchors | {number}, free, fixed))
            # Behind an effect it would only be later, with what it takes in memory until then.
            if len(other.runs) > len(best.runs):
                tried.append((max(found := list(measure(other.runs))), number, other, found))
        if not tried:
            break
        lowest, number, other, found = min(tried, key=itemgetter(0, 1))
        if highest - lowest < max(gain, 1):
            break
        anchors, best, peaks = anchors | {number}, other, found
    return best


def place_lean(
    graph: HookGraph,
    sizes: Sequence[int],
    anchors: Collection[int] = (),
    free: Collection[int] = (),
    fixed: Collection[int] = (),
) -> dict[int, int]:
    """The level of each live task, so that the fewest bytes are alive between any two; ``anchors`` and ``free`` are as
    for :func:`find_levels`. Of ``fixed`` tasks nothing is won that ends the life of what they take: they are as late as
    their users let them."""
    earliest, latest = find_levels(graph, anchors, free)
    levels = dict(latest)
    moving = {n for n in graph.live if earliest[n] < latest[n]}
    for border in range(1, max(latest.values(), default=0)):
        undecided = {n for n in moving if earliest[n] <= border < levels[n]}
        done = {n for n in graph.live if levels[n] <= border}
        levels |= dict.fromkeys(_find_smallest_best(graph, sizes, undecided, done, fixed), border)
    return levels


def _find_smallest_best(
    graph: HookGraph, sizes: Sequence[int], undecided: set[int], done: set[int], fixed: Collection[int]
) -> set[int]:
    """Those of ``undecided`` to run too, when ``done`` have run, so that the fewest bytes are alive."""
    if not undecided:
        return set()
    tasks = {number: node for node, number in enumerate(sorted(undecided))}
    source, sink = len(tasks), len(tasks) + 1
    arcs: list[tuple[int, int, int]] = []
    values: dict[int, int] = {}
    for number, node in tasks.items():
        arcs += [(node, tasks[d], _INFINITE) for d in graph.dependencies[number] if d in tasks]
        for value in (*graph.tasks[number].takes, *graph.tasks[number].gives):
            values.setdefault(value, sink + 1 + len(values))
    returned = set(graph.results)
    for value, node in values.items():
        made = graph.producers.get(value)
        size, start = sizes[value], source if made is None or made in done else tasks.get(made)
        if start is None or not size:
            # Made by what does not run yet.
            continue
        takers = [n for n in graph.takers.get(value, ()) if n not in done]
        if value in returned or any(n not in tasks or n in fixed for n in takers):
            arcs.append((start, sink, size))
        elif takers:
            arcs.append((start, node, size))
            arcs += [(node, tasks[n], _INFINITE) for n in takers]
    # Without a value that lives on in any case nothing is won.
    if not any(tail == source and head != sink for tail, head, _ in arcs):
        return set()
    reached = find_source_side(arcs, source, sink)
    return {number for number, node in tasks.items() if node in reached}
