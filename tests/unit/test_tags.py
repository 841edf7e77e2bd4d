# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the user asked to be saved or recomputed, and that every policy does it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from graph_text import op_names, parse_graph, value_names
from test_min_cut_random import random_graph

from retrograd.contract.attributes import Tag
from retrograd.pipelines.analysis.partition.budget import find_curve
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.min_cut import find_min_cut_partition
from retrograd.pipelines.analysis.partition.op_kinds import OpKind
from retrograd.pipelines.analysis.partition.partition_plan import PartitionPlan, find_default_partition, find_unsavable
from retrograd.pipelines.analysis.partition.tags import TagError, resolve_tags

POLICIES: dict[str, Callable[[JointGraph], list[PartitionPlan]]] = {
    "default": lambda graph: [find_default_partition(graph)],
    "min-cut": lambda graph: [find_min_cut_partition(graph)],
    "budget": lambda graph: [point.plan for point in find_curve(graph).points],
}


def tags(text: str) -> dict[str, str]:
    graph = resolve_tags(parse_graph(text))
    return {graph.values[op.results[0]].name: op.tag.value for op in graph.ops if op.tag is not None}


def test_the_boundary_between_two_blocks_is_saved() -> None:
    text = """
        input x 64
        a = compute@prefer#0 x 64
        b = compute@prefer#0 a 64
        v = view b 64
        list = constant v -
        c = compute@prefer#1 list 64
        d = compute@must#1 c 64
        e = compute@prefer#1 c d 64
        forward e
        backward e
    """
    expected = {"a": "prefer", "b": "never", "c": "prefer", "d": "must", "e": "prefer"}
    assert tags(text) == expected
    # A view that is part of the first block, or none.
    assert tags(text.replace("= view b", "= view@prefer#0 b")) == expected
    assert tags(text.replace("constant v", "constant b")) == expected


def test_inside_of_a_block_nothing_is_a_boundary() -> None:
    text = "input x 8\n a = compute@must#2 x 8\n b = compute@must#2 a 8\n c = compute@must#1 b 8\n"
    assert tags(text + " forward c\n backward c") == {"a": "must", "b": "must", "c": "must"}


def test_a_mark_on_a_view_is_about_what_it_looks_at() -> None:
    text = "input x 8\n a = pointwise x 8\n v = view@never a 8\n w = view@never x 8\n part = view@never a 4\n"
    assert tags(text + " b = compute v w part 8\n forward b\n backward b") == {"a": "never", "part": "never"}


def test_a_preference_gives_way_where_an_op_runs_once() -> None:
    text = "input x 8\n a = random@prefer#0 x 8\n b = opaque@never#0 a 8\n forward b\n backward b"
    assert tags(text) == {"b": "never"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a = random@must x 8", "must be recomputed, but a second run"),
        ("a = opaque@must x 8", "must be recomputed, but a second run"),
        ("b = pointwise@must x 8\n a = view@never b 8", "must be recomputed, and its result must be saved"),
        ("a = pointwise@must t 8", "an op of the backward is marked bwd.recompute = 'must'"),
    ],
)
def test_contradictions(line: str, message: str) -> None:
    with pytest.raises(TagError, match=message) as caught:
        resolve_tags(parse_graph(f"input x 8\n tangent t 8\n {line}\n forward x\n backward a"))
    assert caught.value.op == 0
    assert caught.value.remedy


CHAIN = """
    input x 64
    tangent t 64
    a = !compute{a} x 64
    b = !pointwise{b} a 64
    c = !compute{c} b 64
    g = compute t c 64
    h = compute g b 64
    k = compute h a 64
    forward c
    backward k
"""


def test_what_is_preferred_is_recomputed_unless_that_takes_more_memory() -> None:
    graph = resolve_tags(parse_graph(CHAIN.format(a="@prefer", b="@prefer", c="@prefer")))
    recomputed = {policy: set(op_names(graph, make(graph)[0].recomputed)) for policy, make in POLICIES.items()}
    assert recomputed.pop("budget") == {"a", "c"}
    assert all(ops == {"a", "b", "c"} for ops in recomputed.values())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("marks", "saved", "recomputed"),
    [
        ({"a": "@must"}, {"b"}, {"a"}),
        ({"a": "@must", "b": "@must"}, set(), {"a", "b"}),
        ({"a": "@prefer", "c": "@prefer"}, set(), {"a", "c"}),
        ({"a": "@must", "b": "@never"}, {"b"}, {"a"}),
        ({"a": "@never", "b": "@must"}, {"a"}, {"b"}),
    ],
)
def test_every_policy_does_what_it_is_told(
    policy: str, marks: dict[str, str], saved: set[str], recomputed: set[str]
) -> None:
    graph = resolve_tags(parse_graph(CHAIN.format(**{"a": "", "b": "", "c": "", **marks})))
    plan = POLICIES[policy](graph)[0]
    assert saved <= set(value_names(graph, plan.saved))
    assert recomputed <= set(op_names(graph, plan.recomputed))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(25))
def test_random_tags_on_random_graphs(policy: str, seed: int) -> None:
    chance = random.Random(seed)
    graph = random_graph(seed + 900, ops=25)
    ops = tuple(
        replace(op, tag=chance.choice([None, None, Tag.MUST, Tag.NEVER]))
        if op.id not in graph.tangent_ops and op.kind not in (OpKind.RANDOM, OpKind.OPAQUE, OpKind.VIEW)
        else op
        for op in graph.ops
    )
    graph = resolve_tags(replace(graph, ops=ops))
    for plan in POLICIES[policy](graph):
        assert find_unsavable(graph, plan) is None
        for value in plan.saved:
            producer = graph.values[value].producer
            assert producer is None or graph.ops[producer].tag is not Tag.MUST
        for op in plan.recomputed:
            tensors = [r for r in graph.ops[op].results if graph.values[r].is_tensor]
            assert graph.ops[op].tag is not Tag.NEVER or not tensors
