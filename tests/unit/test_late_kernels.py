# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kernels that wait for what their last ops take: where IREE forms them, and what runs before and after."""

from __future__ import annotations

import dataclasses

import pytest
from graph_text import parse_graph

from retrograd.pipelines.analysis.kernels.fusion import find_steps
from retrograd.pipelines.analysis.kernels.kernel_steps import Step
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph

# A bias that is used twice: the gradient of the first use, what else is worked out, that of the second, and their sum.
TWICE = """
    input x 640
    s = reduction x {size}
    e = compute x 64
    d = compute e 64
    t = reduction d 64
    z = pointwise s t 64
    forward e z
    backward x
"""


def read(text: str) -> tuple[JointGraph, dict[str, int]]:
    graph = parse_graph(text)
    return graph, {value.name: value.id for value in graph.values}


def steps(graph: JointGraph) -> tuple[Step, ...]:
    return find_steps(graph, tuple(range(len(graph.ops))), graph.arguments, graph.forward_results).steps


def test_a_reduction_runs_with_the_sum_that_takes_it() -> None:
    graph, v = read(TWICE.format(size=64))
    formed = steps(graph)
    # s is never in memory: its kernel waits for t, and reads x again.
    assert formed[-1] == Step((v["x"], v["t"]), (v["z"],))
    assert [step.writes for step in formed] == [(v["e"],), (v["d"],), (v["t"],), (v["z"],)]


def test_what_the_sum_does_not_need_runs_after_it() -> None:
    graph, v = read(
        TWICE.format(size=64).replace("t = ", "o = compute e 640\n t = ").replace("forward e", "forward e o")
    )
    assert [step.writes for step in steps(graph)] == [(v[name],) for name in ["e", "d", "t", "z", "o"]]


def test_what_is_spread_over_more_elements_is_added_up_first() -> None:
    graph, v = read(TWICE.format(size=4))
    assert steps(graph)[0] == Step((v["x"],), (v["s"],))


@pytest.mark.parametrize("parts", [1, 4])
def test_the_parts_of_a_split_product_wait_in_memory(parts: int) -> None:
    graph, v = read(TWICE.format(size=64).replace("s = reduction", "s = mm"))
    product = dataclasses.replace(graph.ops[0], parts=parts, packed=False)
    formed = steps(dataclasses.replace(graph, ops=(product, *graph.ops[1:])))
    partial = (len(graph.values),) if parts > 1 else (v["x"],)
    assert formed[-1] == Step((*partial, v["t"]), (v["z"],))
    assert (formed[0] == Step((v["x"],), partial)) == (parts > 1)
