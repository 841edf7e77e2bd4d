# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Value numbering: which ops give what an earlier one gives."""

from collections.abc import Hashable

from graph_text import parse_graph

from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.value_numbering import find_duplicates


def meanings(graph: JointGraph) -> list[Hashable]:
    return [(op.name, tuple(graph.values[r].bytes for r in op.results)) for op in graph.ops]


def merged(text: str, *, across_halves: bool = False) -> dict[str, str]:
    graph = parse_graph(text)
    found = find_duplicates(graph, meanings(graph), across_halves=across_halves)
    name = [graph.values[op.results[0]].name for op in graph.ops]
    return {name[op]: name[earlier] for op, earlier in found.items()}


def test_equal_chains_merge_link_by_link() -> None:
    text = """
        input x 8
        a = pointwise x 8
        b = reduction a 4
        c = pointwise x 8
        d = reduction c 4
        e = pointwise b d 4
        forward e
        backward x
    """
    assert merged(text) == {"c": "a", "d": "b"}


def test_order_and_number_of_operands_tell_ops_apart() -> None:
    text = "input x 8\n input y 8\n a = compute x y 8\n b = compute y x 8\n c = compute x 8\n e = pointwise a b c 8\n"
    assert merged(text + " forward e\n backward x") == {}


def test_a_second_draw_and_an_unknown_op_are_not_the_first() -> None:
    text = "input x 8\n a = random x 8\n b = random x 8\n c = opaque x 8\n d = opaque x 8\n e = pointwise a b c d 8\n"
    assert merged(text + " forward e\n backward x") == {}


def test_what_has_no_meaning_is_left_alone() -> None:
    graph = parse_graph(
        "input x 8\n a = pointwise x 8\n b = pointwise x 8\n c = compute a b 8\n forward c\n backward x"
    )
    assert find_duplicates(graph, [None] * len(graph.ops)) == {}


def test_results_of_the_function_stay_but_others_may_become_them() -> None:
    text = "input x 8\n a = pointwise x 8\n b = pointwise x 8\n c = pointwise x 8\n d = compute c 8\n"
    assert merged(text + " forward a d\n backward b") == {"c": "a"}


def test_halves_can_be_kept_apart() -> None:
    text = """
        input x 8
        tangent t 8
        a = pointwise x 8
        b = pointwise x 8
        y = compute a b 8
        c = pointwise x 8
        d = pointwise x 8
        e = compute c t 8
        g = compute d e 8
        forward y
        backward g
    """
    assert merged(text) == {"b": "a", "d": "c"}
    assert merged(text, across_halves=True) == {"b": "a", "c": "a", "d": "a"}


def test_marked_ops_merge_with_their_like_only() -> None:
    graph = parse_graph("""
        input x 8
        a = pointwise x 8
        b = pointwise x 8
        c = pointwise x 8
        d = pointwise x 8
        e = pointwise a b c d 8
        forward e
        backward x
    """)

    def found(*marks: str | None) -> dict[int, int]:
        return find_duplicates(graph, meanings(graph), [*marks, None])

    assert found(None, None, None, None) == {1: 0, 2: 0, 3: 0}
    # What has no mark is any other's; the first has one here, then the second.
    assert found("must", None, "must", "never") == {1: 0, 2: 0}
    assert found(None, "must", None, "must") == {2: 0, 3: 1}
