# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels that write to one place in turn: products that are added up, pieces that are joined, what is padded."""

from __future__ import annotations

import dataclasses

import pytest
from graph_text import parse_graph

from retrograd.pipelines.analysis.kernels.fusion import find_steps
from retrograd.pipelines.analysis.kernels.kernel_steps import Step
from retrograd.pipelines.analysis.kernels.liveness import compute_scratch
from retrograd.pipelines.analysis.layout.product_kernels import find_product_sums
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph

# A filter of three rows: what each takes of the image, its product, and their sum.
ROWS = """
    input w 64
    input x 6400
    c1 = compute x 640
    p1 = bmm w c1 128
    c2 = compute x 640
    p2 = bmm w c2 128
    s2 = add.Tensor p1 p2 128
    c3 = compute x 640
    p3 = bmm w c3 128
    s3 = add.Tensor s2 p3 128
    y = compute s3 64
    forward y
    backward x
"""


def read(text: str) -> tuple[JointGraph, dict[str, int]]:
    graph = parse_graph(text)
    ops = tuple(dataclasses.replace(op, packed=False) for op in graph.ops)
    return dataclasses.replace(graph, ops=ops), {value.name: value.id for value in graph.values}


def steps(graph: JointGraph) -> tuple[Step, ...]:
    return find_steps(graph, tuple(range(len(graph.ops))), graph.arguments, graph.forward_results).steps


def test_products_are_added_up_in_the_place_of_the_first() -> None:
    graph, v = read(ROWS)
    assert [step.writes for step in steps(graph)] == [(v[name],) for name in ("c1", "p1", "c2", "p1", "c3", "p1", "y")]
    # The sum beside the columns of two rows: those of the next one are made while a row is multiplied.
    formed = find_steps(graph, tuple(range(len(graph.ops))), graph.arguments, graph.forward_results)
    assert compute_scratch(formed) == 128 + 2 * 640


def test_what_is_returned_is_written_to_its_storage_last() -> None:
    graph, v = read(ROWS.replace("forward y", "forward y s3"))
    assert [step.writes for step in steps(graph)] == [(v[name],) for name in ("c1", "p1", "c2", "p1", "c3", "s3", "y")]


@pytest.mark.parametrize("change", [("forward y", "forward y p2"), ("y = compute s3", "y = compute s3 p2")])
def test_a_product_that_is_read_elsewhere_is_no_part_of_a_sum(change: tuple[str, str]) -> None:
    graph, v = read(ROWS.replace(*change))
    work, reads = range(len(graph.ops)), [op.operands for op in graph.ops]
    users = {value: [op.id for op in graph.ops if value in op.operands] for value in range(len(graph.values))}
    held = {*graph.arguments, *graph.forward_results}
    assert find_product_sums(graph, work, reads, users, held).into == {}
    users[v["p2"]], held = users[v["p2"]][:1], {*graph.arguments, v["y"]}
    assert len(find_product_sums(graph, work, reads, users, held).into) == 2


def test_packed_products_are_not_added_to_one_another() -> None:
    graph = parse_graph(ROWS)
    assert all(op.packed for op in graph.ops if op.name == "torch.aten.bmm")
    users = {value: [op.id for op in graph.ops if value in op.operands] for value in range(len(graph.values))}
    found = find_product_sums(graph, range(len(graph.ops)), [op.operands for op in graph.ops], users, ())
    assert (found.into, found.terms) == ({}, set())


def test_pieces_are_joined_one_after_another() -> None:
    graph, v = read("""
        input x 640
        a = compute x 64
        b = compute x 64
        j = cat a b 128
        y = compute j 64
        forward y
        backward x
    """)
    assert steps(graph)[2:4] == (Step((v["a"],), (v["j"],)), Step((v["b"], v["j"]), (v["j"],)))


def test_what_is_padded_is_filled_first() -> None:
    graph, v = read("""
        input x 640
        a = compute x 64
        p = constant_pad_nd a 128
        y = compute p 64
        forward y
        backward x
    """)
    assert steps(graph)[1:3] == (Step((), (v["p"],)), Step((v["a"], v["p"]), (v["p"],)))
