# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which kernels a long sum becomes. The numbers are those of IREE 3.13, which compiled such sums."""

import pytest
from graph_text import parse_graph

from retrograd.pipelines.analysis.kernels.fusion import find_steps


def count_reads(terms: int, end: str, *, is_product: bool) -> list[int]:
    """Of each kernel of a sum the buffers that it reads. Each term is a product that runs inside of a kernel, or a
    value in memory; `end` is what follows."""
    lines = ["input x 64", "input bias 64"]
    for i in range(1, terms + 1):
        lines += [f"input a{i} 64", f"input b{i} 64"] if is_product else [f"input m{i} 64"]
    for i in range(1, terms + 1):
        lines += [f"m{i} = pointwise a{i} b{i} 64"] if is_product else []
        lines += [f"s{i} = pointwise {'m1' if i == 2 else f's{i - 1}'} m{i} 64"] if i > 1 else []
    graph = parse_graph("\n".join([*lines, end.format(f"s{terms}"), "forward y", "backward x"]))
    formed = find_steps(graph, tuple(range(len(graph.ops))), graph.arguments, graph.forward_results)
    return [len(step.reads) for step in formed.steps]


@pytest.mark.parametrize(
    ("terms", "kernels"),
    [(12, [12]), (14, [14]), (15, [3, 13]), (16, [4, 13]), (24, [12, 13]), (26, [14, 13]), (28, [4, 13, 13])],
)
def test_a_kernel_adds_up_so_many_terms(terms: int, kernels: list[int]) -> None:
    assert count_reads(terms, "y = view {} 64", is_product=False) == kernels


@pytest.mark.parametrize(
    ("terms", "kernels"),
    [
        (7, [14]),
        (8, [2, 2, 14]),
        (9, [2, 2, 2, 2, 14]),
        (10, [4, 2, 2, 2, 14]),
        (16, [2, 2, 14, 2, 2, 2, 14]),
        (25, [2, 2, 2, 2, 14, 2, 2, 2, 14, 2, 2, 2, 14]),
    ],
)
def test_products_that_a_kernel_has_no_room_for_are_written_before(terms: int, kernels: list[int]) -> None:
    assert count_reads(terms, "y = view {} 64", is_product=True) == kernels


@pytest.mark.parametrize(("terms", "kernels"), [(5, [11]), (7, [2, 14]), (16, [2, 2, 2, 2, 14, 2, 2, 14])])
def test_what_is_added_last_takes_room(terms: int, kernels: list[int]) -> None:
    assert count_reads(terms, "y = pointwise {} bias 64", is_product=True) == kernels


def test_a_sum_that_one_kernel_uses_twice_is_computed_in_it() -> None:
    # As of a depthwise convolution whose gradient goes through a hardswish.
    end = "l = pointwise x 64\nq = pointwise x 64\nr = pointwise {0} q 64\ny = pointwise l r {0} 64"
    assert count_reads(9, end, is_product=True) == [2, 2, 2, 2, 2, 14]


def test_a_reduction_has_room_for_one_less() -> None:
    assert count_reads(13, "y = reduction {} 64", is_product=False) == [13]
    assert count_reads(14, "y = reduction {} 64", is_product=False) == [3, 12]
