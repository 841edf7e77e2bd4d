# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reductions that are joined and gatherings that start earlier: on small graphs, and legal on random ones."""

from __future__ import annotations

from typing import Any

import pytest
from hook_text import TextGraph, find_order_problem, hook_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.contract.collectives import Collectives, CollectivesError
from retrograd.options import Request
from retrograd.pipelines.analysis.hooks.collectives import (
    find_buckets,
    find_moves,
    order_joined,
    without_chain,
)
from retrograd.pipelines.analysis.hooks.hook_graph import COLLECTIVE, HookGraph, find_following
from retrograd.pipelines.analysis.hooks.hook_schedule import POLICIES
from retrograd.scope import enable

LAYERS = """
    w2 = g
    s2 = start 8: w2
    r2 = wait: s2
    acc 2: r2
    x = g
    w1 = x
    s1 = start 8: w1
    r1 = wait: s1
    acc 1: r1
    w0 = x
    s0 = start 8: w0
    r0 = wait: s0
    acc 0: r0
"""


def buckets(text: str, limit: int, first: int) -> list[str]:
    """The starts that are joined."""
    parsed = TextGraph(text)
    starts = {n: "" for n in parsed.graph.effects if parsed.graph.kind(n) == COLLECTIVE}
    return [parsed.show(bucket.tasks) for bucket in find_buckets(parsed.graph, starts, limit, first)]


def moves(text: str, limit: int = 100) -> str:
    """The order after all gatherings (names that begin with g) were moved."""
    parsed = TextGraph(text)
    gatherings = [n for n, name in enumerate(parsed.names) if name.startswith("g")]
    return parsed.show(find_moves(parsed.graph, gatherings, limit)[1])


@pytest.mark.parametrize(
    ("limit", "first", "joined"),
    [
        (24, 24, ["s2 s1 s0"]),
        (23, 24, ["s2 s1"]),
        (16, 8, ["s1 s0"]),
        (16, 16, ["s2 s1"]),
        (16, 0, ["s1 s0"]),
        (8, 8, []),
        (0, 0, []),
    ],
)
def test_buckets_are_filled_in_captured_order_up_to_their_bytes(limit: int, first: int, joined: list[str]) -> None:
    assert buckets(LAYERS, limit, first) == joined


def test_what_depends_on_a_reduction_is_not_joined_with_it() -> None:
    """Through a value, an accumulation with its hook, or a custom function, which follows all others."""
    for between in ("y = r", "y = tensor_pre 0: r", "z = tensor_pre 0: r\n y = z"):
        assert buckets(f"s = start 8: g\n r = wait: s\n {between}\n t = start 8: y\n q = wait: t", 99, 99) == []
    independent = "s = start 8: g\n r = wait: s\n y = tensor_pre 0: r\n t = start 8: g\n q = wait: t"
    assert buckets(independent, 99, 99) == ["s t"]


def test_two_buckets_may_not_wait_for_each_other() -> None:
    """Joined, s with t comes before p, which takes what s gives, and q, which t depends on, before t: with p and q as
    one, neither is first. When the one bucket is made, what follows its members tells that of the other."""
    text = """
        s = start 8: g
        r = wait: s
        p = start 8: r
        v = wait: p
        q = start 8: g
        w = wait: q
        t = start 8: w
        u = wait: t
        return u v
    """
    parsed = TextGraph(text)
    names = parsed.names.index
    kinds = {names("s"): 0, names("t"): 0, names("p"): 1, names("q"): 1}
    first, second = find_buckets(parsed.graph, kinds, 99, 99)
    joined = order_joined(parsed.graph, first)
    assert find_order_problem(without_chain(parsed.graph), joined) is None
    assert parsed.show(joined) == "q w s t r p v u"
    assert {parsed.show(b.tasks) for b in (first, second)} == {"s t", "p q"}


def test_code_that_communicates_by_itself_parts_buckets() -> None:
    between = "s = start 8: g\n r = wait: s\n h = tensor_pre 0{}: y\n t = start 8: g\n q = wait: t"
    assert buckets(between.format("!"), 99, 99) == []
    assert buckets(between.format(""), 99, 99) == ["s t"]


def test_a_joined_start_stands_where_the_last_one_stood() -> None:
    parsed = TextGraph(LAYERS)
    starts = {n: "" for n in parsed.graph.effects if parsed.graph.kind(n) == COLLECTIVE}
    (bucket,) = find_buckets(parsed.graph, starts, 24, 24)
    assert parsed.show(order_joined(parsed.graph, bucket)) == "w2 x w1 w0 s2 s1 s0 r2 acc2 r1 acc1 r0 acc0"
    assert bucket.bytes == 24


# A weight is gathered for each layer, whose gradient is then reduced.
SHARDED = """
    g1 = start 8: p1
    w1 = wait: g1
    x1 = y w1
    s1 = start 4: x1
    g0 = start 8: p0
    w0 = wait: g0
    x0 = x1 w0
    s0 = start 4: x0
    r1 = wait: s1
    r0 = wait: s0
    return r1 r0
"""


def test_a_gathering_starts_one_stage_earlier() -> None:
    assert moves(SHARDED) == "g1 w1 g0 x1 s1 w0 x0 s0 r1 r0"
    assert moves(SHARDED, limit=7) == "g1 w1 x1 s1 g0 w0 x0 s0 r1 r0"


def test_the_limit_is_of_what_is_early_at_a_time() -> None:
    """Two for one stage are as much as it takes; for two stages, one each."""
    two = "a = y\n g0 = start 8: p\n g1 = start 8: q\n r = wait: g0\n s = wait: g1\n b = a r s\n return b"
    assert moves(two, limit=16) == "g0 g1 a r s b"
    assert moves(two, limit=15) == "g0 a g1 r s b"
    assert moves(SHARDED.replace("y w1", "y w1 g"), limit=8) == "g1 w1 g0 x1 s1 w0 x0 s0 r1 r0"


def test_what_is_computed_for_a_gathering_goes_with_it() -> None:
    assert moves("a = y\n c = p\n g = start 8: c\n r = wait: g\n b = a r\n return b") == "c g a r b"
    assert moves("a = y\n c = a\n g = start 8: c\n r = wait: g\n b = a r\n return b") == "a c g r b"


@pytest.mark.parametrize(
    "before",
    ["h = tensor_pre 0!: y", "h = tensor_pre 0: p", "s = start 8: q\n p = wait: s"],
    ids=["it communicates", "it may write to what is gathered", "it gives what is gathered"],
)
def test_what_a_gathering_does_not_pass(before: str) -> None:
    text = f"a = y\n {before}\n g = start 8: p\n r = wait: g\n b = a r\n return b"
    assert moves(text) == TextGraph(text).show(range(len(TextGraph(text).names)))


def test_a_gathering_at_the_start_stays() -> None:
    assert moves("g = start 8: p\n r = wait: g\n b = y r\n return b") == "g r b"


@given(hook_graphs(max_tasks=20), st.sampled_from([8, 16, 24, 100]), st.sampled_from([8, 100]))
@settings(deadline=None, max_examples=300)
def test_joining_breaks_no_dependency(graph: HookGraph, limit: int, first: int) -> None:
    starts = {n: "" for n in graph.effects if graph.kind(n) == COLLECTIVE}
    loose = without_chain(graph)
    for bucket in find_buckets(graph, starts, limit, first):
        assert len(bucket.tasks) > 1 and bucket.bytes <= max(limit, first)
        assert find_following(loose, bucket.tasks).isdisjoint(bucket.tasks)
        order = order_joined(graph, bucket)
        assert find_order_problem(loose, order) is None
        place = order.index(bucket.tasks[0])
        assert order[place : place + len(bucket.tasks)] == bucket.tasks


@given(hook_graphs(max_tasks=20), st.sampled_from([0, 8, 16, 100]), st.sampled_from(sorted(POLICIES)))
@settings(deadline=None, max_examples=300)
def test_moving_breaks_no_dependency(graph: HookGraph, limit: int, policy: str) -> None:
    """Of a graph in the order of a schedule, with what depends on what as it was captured."""
    gatherings = [n for n in graph.effects if graph.kind(n) == COLLECTIVE]
    moves, order = find_moves(graph, gatherings, limit)
    assert find_order_problem(without_chain(graph), order) is None
    assert limit or not moves
    calls = [n for n in order if (e := graph.tasks[n].effect) is not None and e.communication]
    for move in moves:
        place = order.index(move.task)
        # Nothing that communicates by itself was passed.
        passed = {n for n in calls if n < move.task and order.index(n) > place}
        assert all(graph.kind(n) == COLLECTIVE for n in passed)


def test_what_is_no_way_to_treat_collectives() -> None:
    given: Any = {"bucket_bytes": 1}
    makers: tuple[Any, ...] = (Request, enable)
    for make in makers:
        with pytest.raises(
            TypeError, match=r"collectives is a retrograd\.Collectives or None, got {'bucket_bytes': 1}"
        ):
            make(collectives=given)
    with pytest.raises(ValueError, match="in the background do not run the same"):
        enable(background=True, collectives=Collectives())


def test_numbers_of_bytes() -> None:
    assert Collectives() == Collectives(25 << 20, 1 << 20, 64 << 20)
    with pytest.raises(CollectivesError, match="bucket_bytes is a number of bytes, 0 or more, not -1"):
        Collectives(bucket_bytes=-1)
    with pytest.raises(CollectivesError, match="prefetch_bytes is a number of bytes, 0 or more, not True"):
        Collectives(prefetch_bytes=True)
