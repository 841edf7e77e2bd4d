# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Slices of a function and the search for the smallest one at fault, on plain graphs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from graph_text import op_names, parse_graph, value_names

from retrograd.pipelines.analysis.stages.slices import Slice, SliceGraph, find_fault, find_first, find_needed

GRAPH = parse_graph(
    """
    input x 64
    input w 64
    literal = constant 8
    a = compute x w 64
    size = constant a -
    b = pointwise a literal 64
    list = compute a b -
    c = compute list 64
    d = pointwise b w 64
    dead = pointwise d 64
    e = compute c d size 64
    forward e d
    """
)
SLICES = SliceGraph(GRAPH, {"x", "w", "literal", "a", "b", "c", "d", "dead", "e"})
NUMBER = {v.name: v.id for v in GRAPH.values}
OP = {name: GRAPH.values[NUMBER[name]].producer for name in "abcde"}


def step(name: str) -> int:
    producer = OP[name]
    assert producer is not None
    return producer


def cut(steps: str, *results: str) -> tuple[list[str], list[str]]:
    piece = SLICES.cut([step(name) for name in steps], [NUMBER[r] for r in results])
    return value_names(GRAPH, piece.arguments), op_names(GRAPH, piece.ops)


def test_steps_give_tensors_that_are_known_and_needed() -> None:
    assert op_names(GRAPH, SLICES.steps) == ["a", "b", "c", "d", "e"]


def test_operands_are_seen_through_what_is_no_step() -> None:
    assert value_names(GRAPH, SLICES.operands(step("c"))) == ["a", "b"]
    assert value_names(GRAPH, SLICES.operands(step("e"))) == ["c", "d", "a"]


def test_ancestors_come_nearest_first() -> None:
    assert [GRAPH.values[GRAPH.ops[o].results[0]].name for o in SLICES.ancestors(step("e"))] == ["d", "c", "b", "a"]
    assert [GRAPH.values[GRAPH.ops[o].results[0]].name for o in SLICES.ancestors(step("d"))] == ["b", "a"]


@pytest.mark.parametrize(
    ("prefix", "frontier"),
    [("a", ["a"]), ("ab", ["a", "b"]), ("abc", ["a", "b", "c"]), ("abcd", ["a", "c", "d"]), ("abcde", ["d", "e"])],
)
def test_frontier_is_what_others_still_take(prefix: str, frontier: list[str]) -> None:
    assert value_names(GRAPH, SLICES.frontier([step(name) for name in prefix])) == frontier


def test_a_slice_takes_what_it_does_not_compute() -> None:
    assert cut("e", "e") == (["a", "c", "d"], ["size", "e"])
    assert cut("ae", "e") == (["x", "w", "c", "d"], ["a", "size", "e"])
    assert cut("c", "c") == (["a", "b"], ["list", "c"])


def test_a_literal_is_part_of_the_slice() -> None:
    assert cut("b", "b") == (["a"], ["literal", "b"])


def test_a_step_that_no_result_needs_is_left_out() -> None:
    assert cut("ad", "d") == (["w", "b"], ["d"])


@pytest.mark.parametrize("count", [1, 2, 3, 10, 100])
def test_first_length_at_fault(count: int) -> None:
    for first in range(1, count + 1):
        trials: list[int] = []

        def is_faulty(length: int, first: int = first, trials: list[int] = trials) -> bool:
            trials.append(length)
            return length >= first

        assert find_first(count, is_faulty) == first
        assert len(trials) <= count.bit_length()


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_exactly_those_that_the_fault_needs_are_kept(size: int) -> None:
    candidates = list(range(8))
    for wanted in combinations(candidates, size):
        assert find_needed(candidates, set(wanted).issubset) == wanted


def test_fault_that_no_slice_shows() -> None:
    assert find_needed([1, 2, 3], lambda kept: False) is None
    assert find_needed([], lambda kept: False) is None


def contains(piece: Slice, names: Sequence[str]) -> bool:
    return {step(name) for name in names} <= set(piece.ops)


@pytest.mark.parametrize(("together", "last"), [("a", "a"), ("d", "d"), ("ac", "c"), ("bd", "d"), ("abde", "e")])
def test_fault_of_ops_that_are_compiled_together(together: str, last: str) -> None:
    fault = find_fault(SLICES, lambda piece: contains(piece, list(together)))
    assert fault.step == step(last)
    kept = [o for o in fault.slice.ops if o in SLICES.steps]
    assert op_names(GRAPH, kept) == sorted(together)


def test_fault_that_shows_in_a_prefix_alone() -> None:
    """Where the last op by itself, with all that it needs, does well, the prefix is what is left."""
    fault = find_fault(SLICES, lambda piece: len(piece.results) > 1 and contains(piece, "c"))
    assert fault.step == step("c")
    assert value_names(GRAPH, fault.slice.results) == ["a", "b", "c"]
