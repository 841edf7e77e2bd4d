# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Partitions within a budget: the optimum where all sets can be tried, order and bounds everywhere."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from itertools import combinations

import pytest
from graph_text import parse_graph, value_names
from test_min_cut_random import check_halves, random_graph

from retrograd.pipelines.analysis.kernels.liveness import Peaks, compute_floor
from retrograd.pipelines.analysis.partition.budget import BudgetOptions, find_checkpoints, find_curve
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.op_kinds import OpKind
from retrograd.pipelines.analysis.partition.pareto import Curve, InfeasibleBudget, Point, find_front
from retrograd.pipelines.analysis.partition.partition_plan import (
    find_default_partition,
    find_unsavable,
    plan_from_saved,
)
from retrograd.pipelines.analysis.partition.recompute_cut import CostModel, Device, RecomputeCut, find_candidates
from retrograd.pipelines.analysis.partition.schedule import sink_recomputation


def layers(count: int, size: int = 1000, branches: int = 1) -> JointGraph:
    """A chain of products, each followed by `branches` pointwise ops, and its backward: a deep network."""
    lines = [f"input x {size}", f"input w {size}", f"tangent t {size}"]
    last = "x"
    for i in range(count):
        lines.append(f"m{i} = !compute {last} w {size}")
        last = f"m{i}"
        for j in range(branches):
            lines.append(f"p{i}_{j} = !pointwise {last} {size}")
            last = f"p{i}_{j}"
    output, gradient = last, "t"
    for i in reversed(range(count)):
        for j in reversed(range(branches)):
            before = f"p{i}_{j - 1}" if j else f"m{i}"
            lines.append(f"gp{i}_{j} = pointwise {gradient} {before} {size}")
            gradient = f"gp{i}_{j}"
        taken = f"p{i - 1}_{branches - 1}" if i else "x"
        lines.append(f"gw{i} = compute {gradient} {taken} 8")
        lines.append(f"gm{i} = compute {gradient} w {size}")
        gradient = f"gm{i}"
    weights = " ".join(f"gw{i}" for i in range(count))
    return parse_graph("\n".join([*lines, f"forward {output}", f"backward {gradient} {weights}"]))


def gpt(blocks: int, size: int = 4096) -> JointGraph:
    """A stack of transformer blocks and its backward, in which each op's gradients take its result and operands."""
    ops: list[tuple[str, str, tuple[str, ...], int]] = []
    last = "x"
    for b in range(blocks):
        recipe = [
            ("mean", "reduction", (last,), 64),
            ("norm", "pointwise", (last, f"mean{b}"), size),
            *[(name, "compute", (f"norm{b}", "w"), size) for name in "qkv"],
            ("scores", "compute", (f"q{b}", f"k{b}"), 2 * size),
            ("top", "reduction", (f"scores{b}",), 64),
            ("soft", "pointwise", (f"scores{b}", f"top{b}"), 2 * size),
            ("attended", "compute", (f"soft{b}", f"v{b}"), size),
            ("added", "pointwise", (f"attended{b}", last), size),
            ("up", "compute", (f"added{b}", "w"), 4 * size),
            ("gelu", "pointwise", (f"up{b}",), 4 * size),
            ("down", "compute", (f"gelu{b}", "w"), size),
            ("out", "pointwise", (f"down{b}", f"added{b}"), size),
        ]
        ops += [(f"{name}{b}", kind, taken, bytes_) for name, kind, taken, bytes_ in recipe]
        last = f"out{b}"
    lines = [f"input x {size}", f"input w {size}", f"tangent t {size}"]
    lines += [f"{name} = !{kind} {' '.join(taken)} {bytes_}" for name, kind, taken, bytes_ in ops]
    sizes = {"x": size, "w": size} | {name: bytes_ for name, _, _, bytes_ in ops}
    gradient, count = {last: "t"}, 0
    for name, kind, taken, _ in reversed(ops):
        for operand in taken:
            count += 1
            others = " ".join(dict.fromkeys((gradient[name], *taken)))
            lines.append(f"d{count} = {kind} {others} {sizes[operand]}")
            before = gradient.get(operand)
            gradient[operand] = f"d{count}"
            if before is not None:
                lines.append(f"s{count} = pointwise {before} d{count} {sizes[operand]}")
                gradient[operand] = f"s{count}"
    return parse_graph("\n".join([*lines, f"forward {last}", f"backward {gradient['x']} {gradient['w']}"]))


def price_all(graph: JointGraph) -> list[tuple[int, float]]:
    """Peak and cost of every plan: for each set of values that the forward could leave."""
    tensors = [v.id for v in graph.values if v.is_tensor and v.producer is not None]
    early = [v for v in tensors if graph.values[v].producer not in graph.tangent_ops]
    priced = []
    for size in range(len(early) + 1):
        for chosen in combinations(early, size):
            plan = sink_recomputation(graph, plan_from_saved(graph, chosen, "test"))
            if find_unsavable(graph, plan) is None:
                priced.append((Peaks(graph).least(plan), CostModel().total(graph, plan.recomputed)))
    return priced


# Every plan of each graph is priced.
SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(20, 40))]


@pytest.mark.parametrize("seed", SEEDS)
def test_of_few_values_no_plan_within_the_budget_is_cheaper(seed: int) -> None:
    graph = random_graph(seed, ops=random.Random(seed).randint(4, 10), unit=64)
    assert len(find_candidates(graph)) <= 10
    curve, priced = find_curve(graph), price_all(graph)
    for budget in {p.peak for p in curve.points} | {p.peak - 1 for p in curve.points[:-1]}:
        assert curve.pick(budget).cost <= min(cost for peak, cost in priced if peak <= budget) + 1e-15
    assert curve.points[-1].peak == min(peak for peak, _ in priced)


@pytest.mark.long_cases("12", "17")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_search_stays_above_its_bound_and_finds_no_better_than_there_is(seed: int) -> None:
    graph = random_graph(seed, ops=random.Random(seed).randint(4, 12), unit=64)
    curve, priced = find_curve(graph), price_all(graph)
    # A cut rounds each capacity to 2**-38 of the whole.
    rounding = 1e-12 + max(fixed for _, fixed in curve.bounds) * 2.0**-34
    for point in curve.points:
        best = min(cost for peak, cost in priced if peak <= point.peak)
        assert curve.bound(point.peak) - rounding <= best <= point.cost + 1e-15
        assert point.cost - best - rounding <= curve.gap(point.peak) <= point.cost
        assert compute_floor(graph) + point.plan.saved_bytes <= point.peak == Peaks(graph).least(point.plan)
    with pytest.raises(InfeasibleBudget) as caught:
        curve.pick(curve.points[-1].peak - 1)
    assert caught.value.least == curve.points[-1].peak


@pytest.mark.parametrize("count", [2, 3, 4])
def test_of_a_chain_of_layers_no_plan_within_the_budget_is_cheaper(count: int) -> None:
    graph = packing(layers(count))
    curve, priced = find_curve(graph), price_all(graph)
    assert len(curve.points) >= count
    for budget in {p.peak for p in curve.points} | {p.peak - 1 for p in curve.points[:-1]}:
        assert curve.pick(budget).cost <= min(cost for peak, cost in priced if peak <= budget) + 1e-15
    assert curve.points[-1].peak == min(peak for peak, _ in priced)


def packing(graph: JointGraph) -> JointGraph:
    """`graph` with products for what is compute: their operands and results are packed copies."""
    ops = [
        dataclasses.replace(op, name="torch.aten.mm") if op.kind is OpKind.COMPUTE and len(op.results) == 1 else op
        for op in graph.ops
    ]
    return dataclasses.replace(graph, ops=tuple(ops))


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_floor_is_below_every_plan(is_packed: bool) -> None:
    for seed in range(40):
        graph = random_graph(seed, ops=20, unit=64)
        graph = packing(graph) if is_packed else graph
        candidates = find_candidates(graph)
        for step in (1, 2, 3, 5):
            plan = sink_recomputation(graph, plan_from_saved(graph, candidates[::step], "test"))
            if find_unsavable(graph, plan) is None:
                peak = Peaks(graph).least(plan)
                assert compute_floor(graph) + plan.saved_bytes <= peak


@pytest.mark.parametrize("seed", range(200, 230))
def test_plans_within_a_budget_give_what_the_whole_gives(seed: int) -> None:
    graph = random_graph(seed, ops=30, unit=64)
    for point in find_curve(graph).points:
        assert find_unsavable(graph, point.plan) is None
        check_halves(graph, point.plan)
        assert Peaks(graph).least(point.plan) == point.peak


@pytest.mark.parametrize("graph", [layers(4), layers(24, branches=2), gpt(6)], ids=["short", "deep", "gpt"])
def test_more_memory_never_means_more_recomputation(graph: JointGraph) -> None:
    curve = find_curve(graph)
    high, low = Peaks(graph).least(find_default_partition(graph)), curve.points[-1].peak
    budgets = [low + (high - low) * step // 20 for step in range(21)]
    picked = [curve.pick(b) for b in budgets]
    assert all(p.peak <= b for p, b in zip(picked, budgets, strict=True))
    assert [p.peak for p in picked] == sorted(p.peak for p in picked)
    assert [p.cost for p in picked] == sorted((p.cost for p in picked), reverse=True)
    assert picked[0].cost > 0
    assert picked[-1].cost == 0


def test_a_deep_network_fits_in_much_less() -> None:
    graph = layers(64)
    curve = find_curve(graph)
    default = Peaks(graph).least(find_default_partition(graph))
    # 64 layers keep 128 values; checkpoints every 8 keep 8 and recompute as many at a time.
    assert curve.points[-1].peak < 0.4 * default
    once = sum(CostModel().seconds(graph, op) for op in graph.forward_ops)
    assert curve.points[-1].cost <= once + 1e-12


@pytest.mark.long
def test_thousands_of_nodes() -> None:
    graph = gpt(90)
    assert len(graph.ops) > 4_000
    start = time.perf_counter()
    curve = find_curve(graph)
    print(f"{len(graph.ops)} ops: {len(curve.points)} points in {time.perf_counter() - start:.1f} s")
    default = Peaks(graph).least(find_default_partition(graph))
    assert len(curve.points) >= 5
    assert curve.points[0].cost == 0
    assert curve.points[0].peak <= default
    plan = curve.pick(default // 2).plan
    assert Peaks(graph).least(plan) <= default // 2
    assert find_unsavable(graph, plan) is None
    assert set(plan.recomputed) <= graph.forward_ops


def test_of_a_large_graph_what_gains_little_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, judged = Peaks.compute, itertools.count()
    monkeypatch.setattr(Peaks, "compute", lambda peaks, plan: (next(judged), compute(peaks, plan))[1])
    options = BudgetOptions(large_ops=0)
    coarse, some = find_curve(gpt(6), options), next(judged)
    whole, more = find_curve(gpt(6), dataclasses.replace(options, least_gain=0.0)), next(judged) - some
    assert some < more
    assert coarse.points[0].cost == whole.points[0].cost == 0
    assert coarse.points[0].peak <= (1 + options.least_gain) * whole.points[0].peak


def test_the_same_graph_has_the_same_curve() -> None:
    # So little effort that it runs out: where, must not depend on the clock.
    first, second = (find_curve(layers(12), BudgetOptions(filling=1e-3)) for _ in range(2))
    assert first == second


def test_recomputation_runs_right_before_its_first_use() -> None:
    graph = layers(2)
    plan = plan_from_saved(graph, [], "test")
    names = [value_names(graph, graph.ops[op].results)[0] for op in sink_recomputation(graph, plan).backward]
    # What only the last layer's gradients need is computed before them, the rest comes along with it.
    assert names == ["m0", "p0_0", "m1", "gp1_0", "gw1", "gm1", "gp0_0", "gw0", "gm0"]
    plan = plan_from_saved(graph, [v.id for v in graph.values if v.name == "m1"], "test")
    names = [value_names(graph, graph.ops[op].results)[0] for op in sink_recomputation(graph, plan).backward]
    assert names == ["gp1_0", "m0", "p0_0", "gw1", "gm1", "gp0_0", "gw0", "gm0"]


def test_sinking_keeps_what_runs() -> None:
    for seed in range(300, 320):
        graph = random_graph(seed, ops=30)
        plan = plan_from_saved(graph, find_candidates(graph)[::2], "test")
        sunk = sink_recomputation(graph, plan)
        assert sorted(sunk.backward) == sorted(plan.backward)


def test_prices_buy_less_and_less() -> None:
    graph = layers(8)
    cuts = RecomputeCut(graph, [CostModel().seconds(graph, op.id) for op in graph.ops])
    free, dear = cuts.solve(1e-12), cuts.solve(1.0)
    assert CostModel().total(graph, plan_from_saved(graph, free.saved, "test").recomputed) == 0
    assert dear.saved == frozenset()


def test_checkpoints_stand_between_segments() -> None:
    graph = layers(8)
    names = value_names(graph, sorted(find_checkpoints(graph, 4)))
    assert len(names) == 3
    assert find_checkpoints(graph, 1) == frozenset()


def test_costs_follow_the_device_or_what_was_measured() -> None:
    graph = parse_graph("input x 64\n y = !compute x 64\n v = view y 64\n forward v\n backward v")
    assert CostModel(Device(flops=100.0, bytes=1e9)).seconds(graph, 0) == 1.0
    assert CostModel(Device(flops=1e9, bytes=64.0)).seconds(graph, 0) == 2.0
    assert CostModel(measured={"y": 7.0}).seconds(graph, 0) == 7.0
    assert CostModel().seconds(graph, 1) == 0.0


def test_a_front_has_no_point_that_another_betters() -> None:
    plan = find_default_partition(layers(1))
    points = [Point(9, 0.0, plan), Point(7, 1.0, plan), Point(8, 2.0, plan), Point(3, 2.0, plan), Point(9, 0.5, plan)]
    front = find_front(points)
    assert [(p.peak, p.cost) for p in front] == [(9, 0.0), (7, 1.0), (3, 2.0)]
    curve = Curve(front, ((0.5, 4.0),), held=1)
    assert curve.pick(8).peak == 7
    assert curve.bound(5) == 2.0
    assert curve.gap(3) == 0.0
    assert curve.gap(7) == 0.0
    with pytest.raises(InfeasibleBudget, match="of 2 bytes is infeasible; the least feasible one is 3 bytes"):
        curve.pick(2)
