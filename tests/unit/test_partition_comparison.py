# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The comparison with PyTorch's partitioners: both decide on one graph, and are judged by one measure."""

import partition_comparison
import pytest
from graph_text import parse_graph, value_names
from measure_partitions import Row, Scale, compare_partitions, hold_once, make_problem
from models import MODELS


@pytest.fixture(scope="module", params=["mlp", "lstm"])
def rows(request: pytest.FixtureRequest) -> list[Row]:
    return compare_partitions(make_problem(request.param, MODELS[request.param].make("test")))


@pytest.mark.long_cases("lstm")
def test_at_equal_flops_never_more_bytes_than_the_min_cut_of_pytorch(rows: list[Row]) -> None:
    theirs = [row for row in rows if row.engine == "torch"]
    assert [row.policy for row in theirs] == ["default", "min-cut", *["budget"] * 10]
    for row in theirs:
        assert row.equal_flops_bytes is not None
        assert row.equal_flops_bytes <= row.saved_bytes


@pytest.mark.long_cases("lstm")
def test_what_is_saved_is_counted_alike(rows: list[Row]) -> None:
    # Both save what eager does, by their own ways through their own graphs.
    default = {row.engine: row for row in rows if row.policy == "default"}
    assert default["torch"].saved_bytes == default["retrograd"].saved_bytes
    assert default["torch"].recomputed_flops == default["retrograd"].recomputed_flops == 0
    bought = [row for row in rows if row.engine == "retrograd" and row.policy == "budget"]
    assert bought
    for row in bought:
        assert row.budget is not None
        assert row.peak_bytes <= round(row.budget * default["retrograd"].peak_bytes)


def test_views_of_one_tensor_are_held_once() -> None:
    graph = parse_graph("""
        input x 64
        tangent t 64
        a = compute x 64
        b = view a 64
        c = view a 64
        d = view a 8
        e = view x 64
        g = pointwise t b c d e 64
        forward a
        backward g
    """)
    number = {value.name: value.id for value in graph.values}
    held = [("bc", "a"), ("d", "d"), ("e", "x"), ("bd", "a")]
    for views, expected in held:
        assert value_names(graph, sorted(hold_once(graph, [number[v] for v in views]))) == list(expected)


def test_the_page_has_every_decision_once() -> None:
    made = [
        Row("net", "torch", "min-cut", None, 100, 500, 7, 1e-3, 0.5, 90),
        Row("net", "torch", "budget", 0.9, 100, 500, 7, 1e-3, 0.5, 90),
        Row("net", "torch", "budget", 0.8, 80, 400, 9, 1e-3, 0.5, 81),
        Row("net", "retrograd", "budget", 0.5, 50, 300, 11, 2e-3, 0.1),
    ]
    lines = partition_comparison.document(made, [Scale("all", 10, None, 1.0, 0.9)], 48, {"torch": "2"}, ["--write"])
    assert "Of 2 decisions, retrograd saves more for 1. The median ratio is 0.96." in lines
    assert "| net | `min-cut` | - | 7 | 100 | 90 | 0.90 |" in lines
    assert "| net | `budget` | 0.8 | 9 | 80 | 81 | 1.01 |" in lines
    assert "| net | 100; - | 500; - | 400; 300 | 1.000; 2.000 | 1.000; 0.100 |" in lines
    assert "| all | 10 | - | 1.00 | 0.90 |" in lines
