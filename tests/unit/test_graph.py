# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Joint graphs as plain data: which half an op can be in, what a result needs, whose storage a value looks at."""

from graph_text import op_names, parse_graph, value_names

GRAPH = parse_graph("""
    input x 64
    input w 64
    tangent t 64
    c = constant -
    v = view w c 64
    y = compute x v 64
    mask = pointwise x 16
    loss = reduction y 4
    gy = pointwise t y 64
    gx = compute gy v y 64
    gw = pointwise mask mask 16
    nobody = pointwise x 64
    forward loss
    backward gx gw
""")


def test_forward_ops_are_those_that_its_results_need() -> None:
    assert op_names(GRAPH, GRAPH.forward_ops) == ["c", "v", "y", "loss"]


def test_tangent_ops_depend_on_a_tangent() -> None:
    assert op_names(GRAPH, GRAPH.tangent_ops) == ["gy", "gx"]


def test_backward_ops_are_those_that_its_results_need() -> None:
    assert op_names(GRAPH, GRAPH.backward_ops) == ["c", "v", "y", "mask", "gy", "gx", "gw"]


def test_a_tangent_that_is_not_used_reaches_nothing() -> None:
    graph = parse_graph("input x 4\n tangent t 4\n y = pointwise x 4\n forward y\n backward y")
    assert graph.tangent_ops == frozenset()


def test_required_ops() -> None:
    numbers = {value.name: value.id for value in GRAPH.values}

    def required(results: str, available: str = "") -> list[str]:
        ops = GRAPH.required_ops([numbers[n] for n in results.split()], [numbers[n] for n in available.split()])
        return op_names(GRAPH, ops)

    assert required("gx") == ["c", "v", "y", "gy", "gx"]
    assert required("gx", "y") == ["c", "v", "gy", "gx"]
    assert required("gx", "y v") == ["gy", "gx"]
    assert required("gx", "gx") == []
    assert required("x t") == []
    assert required("gw gx", "gy y") == ["c", "v", "mask", "gx", "gw"]


def test_users_are_in_order_and_each_is_listed_once() -> None:
    users = dict(zip(value_names(GRAPH, range(len(GRAPH.values))), GRAPH.users, strict=True))
    assert op_names(GRAPH, users["v"]) == ["y", "gx"]
    assert op_names(GRAPH, users["mask"]) == ["gw"]
    assert len(users["mask"]) == 1
    assert users["gx"] == ()


def test_view_root_goes_through_views_alone() -> None:
    graph = parse_graph("""
        input x 64
        a = view x 64
        b = view a 64
        y = pointwise b 64
        z = view y 64
        forward z
        backward z
    """)
    roots = [graph.view_root(value.id) for value in graph.values]
    assert value_names(graph, roots) == ["x", "x", "x", "y", "y"]


def test_each_result_of_an_op_is_a_value_of_its_own() -> None:
    graph = parse_graph("input x 8\n a b = random x 8 4\n y = pointwise b 4\n forward a\n backward y")
    assert op_names(graph, graph.required_ops(graph.backward_results, ())) == ["a", "y"]
    assert [graph.users[value.id] for value in graph.values] == [(0,), (), (1,), ()]
