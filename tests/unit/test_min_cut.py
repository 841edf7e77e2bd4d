# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The minimum cut: what each heuristic changes, what values weigh, and graphs of a real model's size."""

import math
from dataclasses import replace

import pytest
from graph_text import op_names, parse_graph, value_names

from retrograd.pipelines.analysis.partition.joint_graph import JointGraph, Op, Value
from retrograd.pipelines.analysis.partition.min_cut import find_min_cut_partition, find_weights
from retrograd.pipelines.analysis.partition.op_kinds import OpKind
from retrograd.pipelines.analysis.partition.recompute_bans import (
    MinCutOptions,
    find_banned,
    find_distances,
    find_far_apart,
)

# `y` out of `x` by an op of some kind; forward and backward use it each.
ONE = """
    input x {taken}
    tangent t 64
    y = {kind} x {given}
    z = pointwise y 64
    g = {user} t y 64
    forward z
    backward g
"""
# A chain of fusible ops, the first and last of which the backward uses.
CHAIN = """
    input x 64
    tangent t 64
    a = pointwise x 64
    b = pointwise a 64
    c = pointwise b 64
    d = pointwise c a 64
    out = compute d 64
    ga = pointwise t a 64
    gd = pointwise ga d 64
    forward out
    backward gd
"""


def saved(text: str, options: MinCutOptions | None = None) -> list[str]:
    graph = parse_graph(text)
    return value_names(graph, find_min_cut_partition(graph, options).saved)


def one(kind: str, taken: int = 64, given: int = 64, user: str = "pointwise") -> str:
    return ONE.format(kind=kind, taken=taken, given=given, user=user)


@pytest.mark.parametrize("kind", ["pointwise", "data-movement", "view", "reduction", "constant"])
def test_cheap_ops_on_arguments_run_again(kind: str) -> None:
    assert saved(one(kind)) == []


@pytest.mark.parametrize("kind", ["random", "opaque"])
def test_what_must_not_run_twice_is_saved_whatever_the_options(kind: str) -> None:
    assert saved(one(kind)) == ["y"]
    assert saved(one(kind), MinCutOptions(ban_compute=False, ban_scatter=False, ban_materialized=False)) == ["y"]


def test_ban_compute() -> None:
    assert saved(one("compute")) == ["y"]
    assert saved(one("compute"), MinCutOptions(ban_compute=False)) == []


def test_ban_scatter() -> None:
    assert saved(one("scatter")) == ["y"]
    assert saved(one("scatter"), MinCutOptions(ban_scatter=False)) == []


def test_ban_reductions() -> None:
    assert saved(one("reduction", taken=64, given=15)) == ["y"]
    assert saved(one("reduction", taken=64, given=15), MinCutOptions(ban_reductions=False)) == []


def test_reduction_ratio() -> None:
    assert saved(one("reduction", taken=64, given=16)) == []
    assert saved(one("reduction", taken=64, given=16), MinCutOptions(reduction_ratio=3)) == ["y"]
    assert saved(one("reduction", taken=64, given=15), MinCutOptions(reduction_ratio=5)) == []


def test_a_view_is_no_reduction() -> None:
    assert saved(one("view", taken=64, given=4)) == []


def test_what_gives_nothing_that_can_be_saved_is_no_reduction() -> None:
    assert not find_banned(parse_graph(one("reduction").replace("reduction x 64", "reduction x -")), MinCutOptions())


def test_ban_materialized() -> None:
    text = one("pointwise", user="compute")
    assert saved(text) == ["y"]
    assert saved(text, MinCutOptions(ban_materialized=False)) == []


def test_materialized_through_views_is_the_value_that_they_look_at() -> None:
    text = """
        input x 64
        tangent t 64
        y = pointwise x 64
        v = view y 64
        g = compute t v 64
        forward v
        backward g
    """
    graph = parse_graph(text)
    assert op_names(graph, find_banned(graph, MinCutOptions())) == ["y"]
    assert saved(text.replace("y = pointwise x 64", "y = view x 64")) == []


# `a` is used at once, by `b`, and again after a product that stands between.
APART = """
    input x 64
    tangent t 64
    a = compute x 64
    b = pointwise a 64
    m = compute b 64
    d = pointwise m a 64
    out = compute d 64
    gd = pointwise t d 64
    forward out
    backward gd
"""


def test_ban_far_apart() -> None:
    assert saved(APART) == ["d"]
    assert saved(APART, MinCutOptions(ban_far_apart=False)) == ["d"]
    assert op_names(parse_graph(APART), find_far_apart(parse_graph(APART))) == []
    # From `a`, if that fuses, `d` is not in the kernel of `b`.
    fusible = APART.replace("a = compute", "a = reduction").replace("d = pointwise m a", "d = pointwise a")
    fusible = fusible.replace("out = compute d", "out = compute d m")
    assert op_names(parse_graph(fusible), find_far_apart(parse_graph(fusible))) == ["d"]
    assert saved(fusible) == ["d"]
    assert saved(fusible, MinCutOptions(ban_far_apart=False)) == []
    view = fusible.replace("d = pointwise a", "d = view a")
    assert op_names(parse_graph(view), find_far_apart(parse_graph(view))) == []


def test_ban_long_chains() -> None:
    assert saved(CHAIN, MinCutOptions(max_chain=3)) == []
    assert saved(CHAIN, MinCutOptions(max_chain=2)) == ["d"]
    assert saved(CHAIN, MinCutOptions(max_chain=2, ban_long_chains=False)) == []


def test_after_a_break_another_chain_starts() -> None:
    links = [f"v{i} = pointwise {f'v{i - 1}' if i else 'x'} 64" for i in range(12)]
    graph = parse_graph("\n".join(["input x 64", *links, "forward v11", "backward v11"]))
    assert op_names(graph, find_banned(graph, MinCutOptions(max_chain=3))) == ["v4", "v9"]


def test_max_backward_distance() -> None:
    text = """
        input x 64
        tangent t 64
        a = pointwise x 64
        b = pointwise a 64
        c = pointwise b 64
        g = pointwise t c 64
        forward c
        backward g
    """
    assert saved(text) == []
    assert op_names(parse_graph(text), find_banned(parse_graph(text), MinCutOptions(max_backward_distance=1))) == [
        "a",
        "b",
    ]
    assert saved(text, MinCutOptions(max_backward_distance=0)) == ["c"]


def test_free_arguments() -> None:
    text = one("pointwise", taken=64, given=16)
    assert saved(text) == []
    assert saved(text, MinCutOptions(free_arguments=False)) == ["y"]
    # Where the argument is the smaller, it is what the backward takes, as it would at no cost.
    assert saved(one("pointwise", taken=16, given=64), MinCutOptions(free_arguments=False)) == []


def test_save_views() -> None:
    text = """
        input x 64
        tangent t 64
        y = compute x 64
        v = view y 16
        g = pointwise t v 64
        forward y
        backward g
    """
    assert saved(text) == ["v"]
    assert saved(text, MinCutOptions(save_views=False)) == ["y"]


@pytest.mark.parametrize("known", [True, False])
def test_of_a_matrix_and_its_transpose_the_matrix_is_saved(known: bool) -> None:
    """As it lies, though the transpose is nearer to the backward."""
    graph = parse_graph("""
        input x 64
        tangent t 64
        w = compute x 64
        turned = view w 64
        y = compute x turned 64
        g = compute t turned 64
        forward y
        backward g
    """)
    number = {value.name: value.id for value in graph.values}
    if known:
        graph = replace(graph, transposed={number["turned"]: number["w"]})
    assert value_names(graph, find_min_cut_partition(graph).saved) == ["w" if known else "turned"]


def test_max_distance_and_fused_weight() -> None:
    # `y` is two ops from the backward, `z`, half as large, is one: and twice as dear, since nothing else writes it.
    text = """
        input x 64
        tangent t 64
        y = compute x 18
        z = pointwise y 10
        out = pointwise z 10
        g = pointwise t z 64
        forward out
        backward g
    """
    assert saved(text) == ["y"]
    assert saved(text, MinCutOptions(fused_weight=1.0)) == ["z"]
    assert saved(text, MinCutOptions(distance_base=1.2)) == ["z"]
    assert saved(text, MinCutOptions(distance_base=1.2, max_distance=1)) == ["y"]


def test_what_a_normalization_reads_twice_is_written() -> None:
    """The sum is read again behind its mean; the distance from the mean, nearer to the backward, takes one read."""
    text = """
        input a 640
        tangent t 640
        b = compute a 640
        x = pointwise a b 640
        mean = reduction x 10
        centred = pointwise x mean 640
        y = pointwise centred 640
        g = pointwise t centred mean 640
        forward y
        backward g
    """
    assert saved(text) == ["x", "mean"]
    assert saved(text, MinCutOptions(fused_weight=1.0)) == ["mean", "centred"]


@pytest.mark.parametrize("options", [MinCutOptions(), MinCutOptions(max_backward_distance=0, max_chain=0)])
def test_constants_are_never_saved(options: MinCutOptions) -> None:
    text = """
        input x 64
        tangent t 64
        c = constant -
        k = constant 64
        y = compute x k c 64
        z = compute y k 64
        g = compute t k c 64
        forward z
        backward g
    """
    graph = parse_graph(text)
    assert op_names(graph, find_banned(graph, options)) == ["y", "z"]
    assert saved(text, options) == []


def test_distance_base() -> None:
    text = """
        input x 64
        tangent t 64
        y = compute x 10
        z = pointwise y 10
        out = pointwise z 10
        g = pointwise t z 64
        forward out
        backward g
    """
    # `y` is written in any case, and weighs 10 times the base squared; `z` 2 * 10 times the base.
    assert saved(text) == ["y"]
    assert saved(text, MinCutOptions(distance_base=1.9)) == ["y"]
    assert saved(text, MinCutOptions(distance_base=2.1)) == ["z"]


def test_the_smallest_of_a_chain_is_saved() -> None:
    text = """
        input x 64
        tangent t 64
        y = compute x 64
        a = pointwise y 64
        b = pointwise a 8
        c = pointwise b 64
        g = pointwise t c 64
        forward c
        backward g
    """
    assert saved(text) == ["b"]
    assert saved(text.replace("b = pointwise a 8", "b = pointwise a 0")) == ["b"]


def test_of_several_results_those_that_the_backward_uses_are_saved() -> None:
    text = "input x 64\n tangent t 64\n a b c = random x 64 32 16\n g = pointwise t b c 64\n forward a\n backward g"
    assert saved(text) == ["b", "c"]


def test_an_op_of_the_backward_alone_is_not_dragged_into_the_forward() -> None:
    text = """
        input x 64
        tangent t 64
        y = compute x 64
        only = compute y 128
        g = pointwise t only 64
        forward y
        backward g
    """
    assert saved(text) == ["y"]
    assert saved(text.replace("128", "16")) == ["only"]


def test_an_op_that_must_not_run_twice_is_saved_though_the_backward_alone_needs_it() -> None:
    text = """
        input x 64
        tangent t 64
        r = random x 64
        small = pointwise r 4
        g = pointwise t r small 64
        forward x
        backward g
    """
    assert saved(text) == ["r"]


def test_what_the_step_overwrites_is_saved_or_what_is_smaller() -> None:
    text = "mutated m 64\n tangent t 64\n y = pointwise m {bytes}\n g = pointwise t y 64\n forward y\n backward g"
    assert saved(text.format(bytes=64)) == ["y"]
    assert saved(text.format(bytes=640)) == ["m"]


def test_weights() -> None:
    graph = parse_graph("""
        input x 10
        mutated m 10
        tangent t 10
        c = constant -
        k = constant 10
        product = compute x m 10
        fused = pointwise product k c 10
        taken = pointwise fused 10
        out = compute taken 10
        alone = pointwise x 10
        g = pointwise t fused 10
        forward out alone
        backward g
    """)
    weights = dict(
        zip(
            value_names(graph, range(len(graph.values))),
            find_weights(graph, MinCutOptions(distance_base=2.0)),
            strict=True,
        )
    )
    assert weights["x"] == 0
    assert weights["m"] == 20
    assert weights["c"] == weights["k"] == math.inf
    # Twice for a value that the forward need not write; then a factor of 2 for each step from the backward.
    assert weights["product"] == 10 * 2**2
    assert weights["fused"] == 2 * 10 * 2
    # No way leads from these to the backward: as far as can be.
    assert weights["taken"] == weights["out"] == weights["alone"] == 10 * 2.0**100


def test_an_op_that_no_gradient_needs_has_no_say() -> None:
    assert saved(one("compute").replace("backward g", "dead = compute t z 64\n backward g")) == ["y"]
    assert saved(one("pointwise").replace("backward g", "dead = compute t y 64\n backward g")) == []


def test_distances() -> None:
    graph = parse_graph(CHAIN)
    assert dict(zip(op_names(graph, range(len(graph.ops))), find_distances(graph), strict=True)) == {
        "a": 1,
        "b": 3,
        "c": 2,
        "d": 1,
        "out": 10**9,
        "ga": 0,
        "gd": 0,
    }


def test_a_gradient_that_depends_on_no_tangent_is_near() -> None:
    graph = parse_graph("input x 64\n y = compute x 64\n z = pointwise y 64\n forward y\n backward z")
    assert find_distances(graph) == [1, 0]


def test_twenty_thousand_ops() -> None:
    """Layers of a product and an activation: of each layer the activation, which the next product reads, is saved."""
    layers = 6_667
    values = [Value(0, "x", 64, None), Value(1, "t", 64, None)]
    ops: list[Op] = []

    def add(kind: OpKind, *operands: int) -> int:
        values.append(Value(len(values), f"v{len(values)}", 64, len(ops)))
        ops.append(Op(len(ops), f"test.{kind.value}", kind, operands, (len(values) - 1,)))
        return len(values) - 1

    activations = [0]
    for _ in range(layers):
        activations.append(add(OpKind.POINTWISE, add(OpKind.COMPUTE, activations[-1])))
    gradient = 1
    for activation in reversed(activations[1:]):
        gradient = add(OpKind.POINTWISE, gradient, activation)
    graph = JointGraph(tuple(values), tuple(ops), (0, 1), frozenset({1}), (activations[-1],), (gradient,))
    assert len(graph.ops) > 20_000
    found = find_min_cut_partition(graph)
    assert found.saved == tuple(activations[1:])
    assert found.saved_bytes == 64 * layers


# A product, of which attention reads three parts.
PARTS = """
    input x 96
    tangent t 32
    y = mm x x 96
    a b c = split.Tensor y 32 32 32
    q = permute a 32
    k = permute b 32
    v = permute c 32
    o = compute q k v 32
    {more}
    g = _scaled_dot_product_flash_attention_for_cpu_backward t q k {last} o 96
    forward o {result}
    backward g
"""


def test_attention_reads_parts_of_what_is_saved_whole() -> None:
    assert saved(PARTS.format(more="", last="v", result="")) == ["y", "o"]


def test_parts_are_saved_apart_where_others_read_them_or_one_is_missing() -> None:
    assert saved(PARTS.format(more="", last="q", result="")) == ["q", "k", "o"]
    wide = PARTS.format(more="h = pointwise t v 32", last="v", result="")
    assert "y" not in saved(wide.replace("backward g", "backward g h"))
