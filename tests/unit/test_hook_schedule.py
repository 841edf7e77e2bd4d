# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Schedules of hooks: each policy on the graphs that motivate its rules, and on random ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hook_text import TextGraph, find_order_problem, hook_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.pipelines.analysis.hooks.hook_graph import WAIT, HookGraph
from retrograd.pipelines.analysis.hooks.hook_schedule import POLICIES, HookSchedule, find_stages

# Two layers as captured: each has a hook on its output's gradient, and a parameter with a hook after accumulation.
TWO_LAYERS = """
    h1 = tensor_pre 1: g
    w1 = h1
    g0 = h1
    h0 = tensor_pre 0: g0
    w0 = h0
    acc 1: w1
    post_acc 11:
    acc 0: w0
    post_acc 10:
    final 0:
"""


def schedule(text: str, policy: HookSchedule) -> str:
    parsed = TextGraph(text)
    return parsed.show(POLICIES[policy](parsed.graph))


def count_stages(text: str, policy: HookSchedule) -> int:
    graph = TextGraph(text).graph
    return len(find_stages(graph, POLICIES[policy](graph)))


def test_eager_order_keeps_the_chain_and_computes_what_is_needed_next() -> None:
    expected = "h1 g0 h0 w1 acc1 post_acc11 w0 acc0 post_acc10 final0"
    assert schedule(TWO_LAYERS, "eager-order") == expected


def test_asap_accumulates_as_soon_as_the_gradient_exists() -> None:
    assert schedule(TWO_LAYERS, "asap") == "h1 w1 acc1 post_acc11 g0 h0 w0 acc0 post_acc10 final0"


def test_fewest_stages_cuts_only_where_compute_follows_a_hook() -> None:
    assert schedule(TWO_LAYERS, "fewest-stages") == "h1 w1 g0 h0 acc1 post_acc11 w0 acc0 post_acc10 final0"
    assert [count_stages(TWO_LAYERS, policy) for policy in POLICIES] == [3, 3, 3, 2]


# The gradient of a weight is reduced, and those of two inputs are computed.
REDUCED = """
    w = g
    s = start 8: w
    r = wait: s
    acc 0: r
    x = g
    h = tensor_pre 0: x
    y = h
    return y
"""


def test_a_collective_is_waited_for_when_what_it_gives_is_needed() -> None:
    assert schedule(REDUCED, "overlap") == "w s x h y r acc0"
    assert schedule(REDUCED, "eager-order") == "w s r x acc0 h y"


def test_what_a_user_needs_besides_is_computed_before_the_wait() -> None:
    text = """
        s = start 8: g
        r = wait: s
        a = g
        y = r a
        return y
    """
    for policy in ("eager-order", "asap", "overlap"):
        assert schedule(text, policy) == "s a r y", policy


def test_what_may_write_to_a_value_waits_for_the_collective_on_it() -> None:
    """The hook takes what was sent, after that was waited for: it may write to it. The one before it did so already."""
    text = """
        tensor_pre 1: g
        s = start 8: g
        r = wait: s
        h = tensor_pre 0: g
        return h r
    """
    for policy in POLICIES:
        assert schedule(text, policy) == "tensor_pre1 s r h", policy


def test_overlap_starts_communication_before_anything_that_it_does_not_need() -> None:
    text = """
        a = g
        x = tensor_pre 0: a
        b = g
        y = tensor_pre 1!: b
        c = y
        return c x
    """
    assert schedule(text, "asap") == "a x b y c"
    assert schedule(text, "overlap") == "b y a x c"


@pytest.mark.parametrize("policy", POLICIES)
def test_unpack_hooks_run_right_before_the_first_use(policy: HookSchedule) -> None:
    text = """
        s = unpack 0: packed
        p = pre 1: g
        a = p
        b = a s
        q = post 2: b
        c = s
        return q c
    """
    order = schedule(text, policy).split()
    assert order.index("s") < order.index("b")
    # Capture runs it before the pre-hook of its node; eager, after.
    assert (order.index("s") > order.index("p")) == (policy != "fewest-stages")


def test_unpack_hooks_of_one_node_keep_their_order() -> None:
    text = """
        s = unpack 0:
        t = unpack 1:
        p = pre 2: g
        a = p t
        b = p s
        return a b
    """
    assert schedule(text, "eager-order") == "p s t a b"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("a = g\nx = pre 0: a\ny = pre 1: a\nreturn x y", "x", "y"),
        ("x = backward 0: g\na = k\nb = a\ny = backward 1: b\nreturn x y", "x", "y"),
        ("a = g\nacc 0: a\nb = k\npost_acc 7:\nacc 1: b", "acc0", "post_acc7"),
        ("a = g\nacc 0: a\npost_acc 7:\nacc 0: g", "post_acc7", "acc0"),
        ("b = g\na = b\npost 0: b\nreturn a", "a", "post0"),
        ("acc 0: g\npost_acc 1:\npost 2: g", "post_acc1", "post2"),
        ("a = g\nreturn a\nfinal 0:", "a", "final0"),
        ("b = k\na = g\nx = tensor_pre 0!: a\ny = tensor_pre 1!: b\nreturn x y", "x", "y"),
        ("a = g\nacc 0: a\nx = backward 1!: k\nreturn x", "acc0", "x"),
    ],
    ids=[
        *["registration", "custom functions", "post-accumulate", "same parameter", "post", "post after all", "final"],
        *["collectives", "gradients that are sent"],
    ],
)
def test_true_dependencies(policy: HookSchedule, text: str, before: str, after: str) -> None:
    order = schedule(text, policy).split()
    assert len(order) - order[::-1].index(after) > order.index(before) + 1


def test_dead_compute_goes_and_effects_stay() -> None:
    text = "dead = g\nsize = dead\nx = pre 0: g\nunused = x\nfinal 0:"
    for policy in POLICIES:
        assert schedule(text, policy) == "x final0"


def test_accumulations_alone_cut_nothing() -> None:
    layers = "\n".join(f"g{i + 1} = g{i}\nw{i} = g{i}\nacc {i}: w{i}" for i in range(5)) + "\nreturn g5\nfinal 0:"
    assert [count_stages(layers, policy) for policy in POLICIES] == [1, 1, 1, 1]
    hooked = layers.replace("w2 = g2", "h2 = tensor_pre 0: g2\nw2 = h2")
    assert [count_stages(hooked, policy) for policy in POLICIES] == [2, 2, 2, 2]


def test_large_gradients_are_accumulated_before_the_next_is_worked_out() -> None:
    layers = "\n".join(
        f"g{i + 1} = g{i}\nw{i} = g{i}\nacc {i}*: w{i}\nb{i} = g{i}\nacc {i + 9}: b{i}" for i in range(3)
    )
    assert [count_stages(layers, policy) for policy in POLICIES] == [4, 4, 4, 1]
    assert schedule(layers, "asap") == "w0 acc0* g1 b0 w1 acc9 acc1* g2 b1 w2 acc10 acc2* b2 acc11"
    followed = "w = g\nacc 0*: w\npost_acc 0: w\nlate = g\nacc 1: late"
    assert schedule(followed, "eager-order") == "w acc0* post_acc0 late acc1"


def sent(marks: str) -> str:
    """Layers whose gradients are sent when they are there; of each, what stands behind the accumulation's number."""
    lines = [
        f"g{i + 1} = g{i}\nw{i} = g{i}\nacc {i}{'' if mark == '-' else mark}: w{i}\npost {i}!: w{i}"
        for i, mark in enumerate(marks)
    ]
    return "\n".join(lines)


def test_overlap_works_out_small_gradients_that_are_sent_in_one_stage() -> None:
    assert schedule(sent("--"), "asap") == "w0 acc0 post0! g1 w1 acc1 post1!"
    assert schedule(sent("--"), "overlap") == "g1 w0 w1 acc0 post0! acc1 post1!"
    # A large one is sent before the next is worked out, and so is what makes a bucket.
    assert schedule(sent("*-"), "overlap") == "w0 acc0* post0! g1 w1 acc1 post1!"
    assert schedule(sent("-*"), "overlap") == "w0 acc0 post0! g1 w1 acc1* post1!"
    assert schedule(sent("~~-"), "overlap") == "g1 w0 w1 acc0~ post0! acc1~ post1! g2 w2 acc2 post2!"
    # What is not sent waits, and so does what a hook that gives something comes before.
    assert schedule(sent("--").replace("post 0!: w0", "post 0: w0"), "overlap") == "g1 w1 acc1 post1! w0 acc0 post0"
    assert schedule(sent("--").replace("post 0!", "p = post 0!"), "overlap") == "w0 acc0 p g1 w1 acc1 post1!"


@pytest.mark.parametrize("policy", ["eager-order", "overlap"])
def test_gradients_of_a_bucket_are_worked_out_in_one_stage(policy: HookSchedule) -> None:
    """However large they are: nothing is sent before the last of them is there."""
    filled = sent("***-").replace("!", "!@0", 3).replace("!: w3", "!@1: w3").replace("post 2!@0", "post 2!@1")
    wanted = "g1 w0 w1 acc0* post0!@0 acc1* post1!@0 g2 g3 w2 w3 acc2* post2!@1 acc3 post3!@1"
    assert schedule(filled, policy) == wanted
    # A hook of the user's among them sees what eager's sees, and so does one that gives something.
    seen = filled.replace("post 0!@0: w0", "post 0!@0: w0\npost 9: w0")
    assert schedule(seen, "eager-order").startswith("w0 acc0* post0!@0 post9 g1 w1 acc1* post1!@0")
    given = filled.replace("post 0!@0", "p = post 0!@0")
    assert schedule(given, policy).startswith("w0 acc0* p g1 w1")


def test_nothing_at_all() -> None:
    for policy in POLICIES:
        assert POLICIES[policy](HookGraph(())) == ()
    assert find_stages(HookGraph(()), ()) == ()


def test_what_is_no_schedule() -> None:
    parsed = TextGraph("a = g\nx = pre 0: a\nreturn x")
    assert find_order_problem(parsed.graph, (0, 1)) is None
    assert find_order_problem(parsed.graph, (1, 0)) == "task 1 runs before task 0, on which it depends"
    assert "are missing" in str(find_order_problem(parsed.graph, (0,)))


def all_orders(graph: HookGraph, done: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every schedule of a graph."""
    if len(done) == len(graph.live):
        yield done
    for number in graph.live.difference(done):
        if graph.dependencies[number].issubset(done):
            yield from all_orders(graph, (*done, number))


@given(hook_graphs(max_tasks=6))
@settings(deadline=None, max_examples=150)
def test_fewest_stages_is_the_fewest(graph: HookGraph) -> None:
    best = min(len(find_stages(graph, order)) for order in all_orders(graph))
    assert len(find_stages(graph, POLICIES["fewest-stages"](graph))) == best


@given(hook_graphs(max_tasks=25), st.sampled_from(sorted(POLICIES)))
@settings(deadline=None, max_examples=300)
def test_every_policy_respects_every_dependency(graph: HookGraph, policy: HookSchedule) -> None:
    order = POLICIES[policy](graph)
    assert find_order_problem(graph, order) is None
    fewest = len(find_stages(graph, POLICIES["fewest-stages"](graph)))
    assert fewest <= len(find_stages(graph, order))
    for number in graph.live:
        assert all(number in graph.successors[before] for before in graph.dependencies[number])


@given(hook_graphs(max_tasks=25))
@settings(deadline=None, max_examples=200)
def test_eager_order_moves_unpack_hooks_alone(graph: HookGraph) -> None:
    order = [n for n in POLICIES["eager-order"](graph) if graph.kind(n) not in (None, "unpack", WAIT)]
    assert order == [n for n in graph.effects if graph.kind(n) not in ("unpack", WAIT)]
