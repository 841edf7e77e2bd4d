# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which stage computes what: no placement has fewer bytes between any two stages, by trying all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from hook_text import TextGraph, find_order_problem, hook_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.pipelines.analysis.hooks.hook_graph import HookGraph
from retrograd.pipelines.analysis.hooks.hook_schedule import Order, find_levels
from retrograd.pipelines.analysis.stages.stage_placement import Stages, find_lean_stages, place_lean

# Two layers: their outputs' gradients, an island between them, and weights' gradients, which wait for nobody.
LAYERS = """
    d2 = g
    w2 = d2 a2
    h = island 0: d2
    d1 = h
    w1 = d1 a1
    k = island 1: d1
    d0 = k
    return w2 w1 d0
"""
# By name: what goes from layer to layer is large, weights are small; a2 and a1 are residuals.
BYTES = {"d2": 100, "a2": 50, "d1": 100, "a1": 50, "w2": 10, "w1": 10, "h": 100, "k": 100, "d0": 100}


def count_alive(graph: HookGraph, sizes: Sequence[int], levels: Mapping[int, int], border: int) -> int:
    """Bytes alive when all tasks up to this level have run."""
    done = {n for n, level in levels.items() if level <= border}
    alive = 0
    for value, takers in graph.takers.items():
        made = graph.producers.get(value)
        if (made is None or made in done) and (value in graph.results or not done.issuperset(takers)):
            alive += sizes[value]
    untaken = set(graph.results) - graph.takers.keys()
    return alive + sum(sizes[v] for v in untaken if graph.producers.get(v) in done)


def numbers_of(text: str) -> dict[str, int]:
    """The number of each value, which is the order in which `TextGraph` meets them."""
    found: dict[str, int] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        given, equals, right = line.partition("=")
        names = (
            line.split()[1:]
            if not equals
            else [*right.partition(":")[2 if ":" in right else 0].split(), *given.split()]
        )
        for name in names:
            found.setdefault(name, len(found))
    return found


def levels_by_name(text: str, sizes: dict[str, int]) -> dict[str, int]:
    parsed, numbers = TextGraph(text), numbers_of(text)
    given = [0] * len(numbers)
    for name, size in sizes.items():
        given[numbers[name]] = size
    levels = place_lean(parsed.graph, given)
    return {parsed.names[number]: level for number, level in levels.items()}


def test_gradients_of_weights_are_where_their_operands_die() -> None:
    levels = levels_by_name(LAYERS, BYTES)
    assert (levels["d2"], levels["w2"], levels["d1"], levels["w1"], levels["d0"]) == (1, 1, 2, 2, 3)


def test_what_grows_waits() -> None:
    """A widening is computed where it is used: what it widens is smaller."""
    sizes = BYTES | {"wide": 400, "x": 100}
    text = "wide = x\n" + LAYERS.replace("d0 = k", "d0 = k wide")
    assert levels_by_name(text, sizes)["wide"] == 3
    assert levels_by_name(text, sizes | {"wide": 4})["wide"] == 1


def every_placement(graph: HookGraph) -> Iterator[dict[int, int]]:
    earliest, latest = find_levels(graph)
    numbers = sorted(graph.live)
    for chosen in product(*(range(earliest[n], latest[n] + 1) for n in numbers)):
        levels = dict(zip(numbers, chosen, strict=True))
        # Compute follows effects of lower levels only, which its earliest level sees to.
        if all(levels[b] <= levels[n] for n in numbers for b in graph.dependencies[n]):
            yield levels


@settings(max_examples=150, deadline=None)
@given(hook_graphs(max_tasks=9), st.data())
def test_no_placement_has_fewer_bytes_at_any_border(graph: HookGraph, data: st.DataObject) -> None:
    values = 1 + max((v for task in graph.tasks for v in (*task.takes, *task.gives)), default=0)
    values = max(values, 1 + max(graph.results, default=0))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=values, max_size=values))
    levels = place_lean(graph, sizes)
    stages = Stages.of(graph, levels)
    assert find_order_problem(graph, [task for run in stages.runs for task in run]) is None
    borders = range(1, max(levels.values(), default=0))
    best = [count_alive(graph, sizes, levels, border) for border in borders]
    for other in every_placement(graph):
        assert all(one <= count_alive(graph, sizes, other, border) for one, border in zip(best, borders, strict=True))


# The logits' gradient from the logits and then two products of it; the logits die where it exists.
HEAD = """
    d = logits
    t = d
    x = t
    w = t a
    h = island 0: x
    y = h
    return w y
"""


def test_a_stage_is_cut_in_front_of_a_product_where_that_lowers_the_peak() -> None:
    parsed, numbers = TextGraph(HEAD), numbers_of(HEAD)
    graph, names = parsed.graph, parsed.names
    sizes = [100 if name in ("logits", "d", "t") else 1 for name in numbers]
    tried: list[int] = []

    def measure(runs: Sequence[Order]) -> list[int]:
        """As if a stage took all that its tasks take and give."""
        tried.append(len(runs))
        return [
            sum(sizes[v] for v in {v for n in run for v in (*graph.tasks[n].takes, *graph.tasks[n].gives)})
            for run in runs
        ]

    product_x = names.index("x")
    stages = find_lean_stages(graph, sizes, {product_x: 100}, measure, free=[names.index("t")], gain=50)
    shown = [parsed.show(run) for run in stages.runs]
    assert shown == ["d", "t x w", "h", "y"]
    whole = find_lean_stages(graph, sizes, {product_x: 100}, measure, free=[names.index("t")], gain=500)
    assert [parsed.show(run) for run in whole.runs] == ["d t x w", "h", "y"]
    assert find_lean_stages(graph, sizes, {}, measure).runs == whole.runs and len(tried) == 4
