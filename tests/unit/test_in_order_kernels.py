# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the passes for kernels one at a time change of the kernels that liveness counts by."""

import dataclasses

from graph_text import parse_graph

from retrograd.pipelines.analysis.kernels.fusion import find_steps
from retrograd.pipelines.analysis.kernels.in_order_kernels import order_kernels
from retrograd.pipelines.analysis.kernels.kernel_steps import Steps
from retrograd.pipelines.analysis.kernels.liveness import compute_scratch
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph


def order(text: str) -> tuple[JointGraph, Steps, Steps]:
    """The graph, and its kernels side by side and as the passes leave them."""
    graph = parse_graph(text + "\n backward x")
    # Small products read their operands as they are.
    graph = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, packed=False) for op in graph.ops))
    formed = find_steps(graph, tuple(range(len(graph.ops))), graph.arguments, graph.forward_results)
    return graph, formed, order_kernels(graph, formed, graph.arguments)


COLUMNS = """
    input x 640
    input go 640
    p = compute x 640
    q = compute x 1280
    l = constant p q -
    c = cat l 1920
    v = view c 1920
    m = mm {product} 128
    {more}
"""


def test_columns_of_a_product_are_in_memory_one_part_at_a_time() -> None:
    graph, formed, ordered = order(COLUMNS.format(product="go v", more="forward m"))
    (columns,) = (v.id for v in graph.values if v.name == "c")
    assert formed.bytes[columns] == 1920
    assert ordered.bytes[columns] == 1280


def test_columns_that_come_first_or_are_read_besides_stay_whole() -> None:
    for product, more in (("v go", "forward m"), ("go v", "n = compute c 64\n forward m n")):
        graph, _, ordered = order(COLUMNS.format(product=product, more=more))
        (columns,) = (v.id for v in graph.values if v.name == "c")
        assert ordered.bytes[columns] == 1920


def test_smaller_parts_are_together_as_far_as_they_are_no_larger_than_the_largest() -> None:
    text = COLUMNS.format(
        product="go v", more="k = constant p p p -\n d = cat k 1920\n w = view d 1920\n n = mm go w 128"
    )
    graph, _, ordered = order(text + "\n forward m n")
    (columns,) = (v.id for v in graph.values if v.name == "d")
    assert ordered.bytes[columns] == 2 * 640


CHAIN = """
    input x 65536
    s = compute x 64
    d = add.Tensor {operands} 65536
    a = reduction d 64
    b = compute a 64
    e = {user} d b 65536
    f = compute e 64
    forward f
"""


def test_what_is_made_of_an_argument_is_computed_where_it_is_used() -> None:
    graph, formed, ordered = order(CHAIN.format(operands="x s", user="reduction"))
    (made,) = (v.id for v in graph.values if v.name == "d")
    x, s = (v.id for v in graph.values if v.name in ["x", "s"])
    assert made in formed.bytes
    assert made not in ordered.bytes
    readers = [step for step in ordered.steps if x in step.reads and s in step.reads]
    assert len(readers) == 2
    # Of both that are as large as x, d is gone; s stays until its last reader has run, beside b.
    assert compute_scratch(formed, in_order=True) == 2 * 65536 + 2 * 64
    assert compute_scratch(ordered, in_order=True) == 65536 + 3 * 64


def test_what_is_made_of_two_tensors_or_read_by_a_product_stays() -> None:
    _, formed, ordered = order("input y 65536\n" + CHAIN.format(operands="x y", user="reduction"))
    assert ordered == formed
    graph, _, ordered = order(CHAIN.format(operands="x s", user="compute"))
    (made,) = (v.id for v in graph.values if v.name == "d")
    assert made in ordered.bytes
