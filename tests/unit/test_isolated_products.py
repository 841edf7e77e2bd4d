# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products on packed operands whose users run in a kernel of their own."""

from __future__ import annotations

import dataclasses

import pytest
from graph_text import parse_graph

from retrograd.pipelines.analysis.kernels.fusion import find_steps
from retrograd.pipelines.analysis.kernels.kernel_steps import Step
from retrograd.pipelines.analysis.layout.product_kernels import repays_isolation
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph

# The backward of a GELU: the product's result is multiplied by what was saved, and by what is computed behind it.
GELU = """
    input x 64
    input w 64
    input h {size}
    p = mm x w 640
    e = compute x 640
    y = pointwise p h 640
    z = pointwise y e 640
    forward z e
    backward x
"""


def steps(text: str, *, packed: bool = True) -> tuple[tuple[Step, ...], dict[str, int]]:
    graph: JointGraph = parse_graph(text)
    product = dataclasses.replace(graph.ops[0], packed=packed)
    graph = dataclasses.replace(graph, ops=(product, *graph.ops[1:]))
    formed = find_steps(graph, tuple(range(len(graph.ops))), graph.arguments, graph.forward_results)
    return formed.steps, {value.name: value.id for value in graph.values}


def test_an_isolated_product_runs_right_before_what_takes_it() -> None:
    found, v = steps(GELU.format(size=640))
    packed = len(v)
    assert found == (
        Step((v["x"],), (v["e"],)),
        Step((v["x"],), (packed,)),
        Step((v["w"],), (packed + 1,)),
        Step((packed, packed + 1), (v["p"],)),
        Step((v["p"], v["h"], v["e"]), (v["z"],)),
    )


def test_a_product_on_plain_operands_takes_its_users_in() -> None:
    found, v = steps(GELU.format(size=640), packed=False)
    assert found == (Step((v["x"],), (v["e"],)), Step((v["x"], v["w"], v["h"], v["e"]), (v["z"],)))


def test_a_product_that_is_read_twice_is_in_memory_anyway() -> None:
    found, v = steps(GELU.format(size=640).replace("forward z e", "q = compute p 64\n forward z e q"))
    assert [step.writes for step in found].index((v["p"],)) < [step.writes for step in found].index((v["e"],))


@pytest.mark.parametrize(("others", "repays"), [((640,), True), ((320, 320), True), ((320,), False), ((), False)])
def test_what_is_read_besides_decides(others: tuple[int, ...], repays: bool) -> None:
    assert repays_isolation(640, *others) == repays
