# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where functions are cut so that their values live no longer than they must, counted by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations, pairwise

import pytest

from retrograd.contract.plan import RunStage, StagePlan, insert_frees
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph, Op, Value
from retrograd.pipelines.analysis.partition.op_kinds import OpKind
from retrograd.pipelines.analysis.stages.offload_steps import fetch_arguments, offload_results
from retrograd.pipelines.analysis.stages.stage_cuts import CutFunction, find_cuts, split_behind
from retrograd.pipelines.stages.peaks import plan_peak

UNIT = 1 << 12


def chain(residuals: int, *, unit: int = UNIT) -> CutFunction:
    """A backward of one reduction for each residual, each a gradient and a part by itself, the last residual first."""
    values = [Value(n, f"r{n}", unit, None) for n in range(residuals)]
    ops = []
    for n in range(residuals):
        values.append(Value(residuals + n, f"g{n}", unit, n))
        ops.append(Op(n, "torch.aten.cumsum", OpKind.REDUCTION, (residuals - 1 - n,), (residuals + n,)))
    results = tuple(range(residuals, 2 * residuals))
    graph = JointGraph(tuple(values), tuple(ops), tuple(range(residuals)), frozenset(), (), results)
    return CutFunction(graph, tuple((n,) for n in range(residuals)), frozenset(range(residuals)))


def test_a_residual_is_held_from_the_start_to_the_end_of_the_stage_that_takes_it_last() -> None:
    parts = chain(4)
    assert parts.whole_peak == (4 + 4) * UNIT
    # Before the third stage two residuals are gone, and two gradients are there.
    assert [parts.peak(n, n + 1) for n in range(4)] == [(4 + 1) * UNIT] * 4
    assert parts.peak(1, 3) == (1 + 3 + 2) * UNIT


def test_what_is_not_freed_does_not_count() -> None:
    parts = chain(4)
    lent = CutFunction(parts.graph, parts.ops, frozenset(), outside=7)
    assert lent.peak(0, 1) == UNIT + 7
    assert lent.whole_peak == 4 * UNIT + 7


def test_the_fewest_stages_that_stay_within_what_a_step_takes_in_any_case() -> None:
    parts = chain(8)
    assert find_cuts([parts]) == [tuple(range(1, 8))]
    # 8 residuals and two gradients at a time are within the floor, three are not.
    assert find_cuts([parts], floor=10 * UNIT) == [(2, 4, 6)]
    assert find_cuts([parts], floor=16 * UNIT) == [()]


def test_a_gain_that_is_too_small_cuts_nothing() -> None:
    parts = chain(4)
    assert find_cuts([parts], gain=2 * UNIT) == [(1, 2, 3)]
    assert find_cuts([parts], gain=3 * UNIT) == [()]


def test_a_half_that_takes_less_than_the_other_one_stays_whole() -> None:
    small, large = chain(2), chain(8)
    assert find_cuts([small, large]) == [(), tuple(range(1, 8))]
    assert find_cuts([]) == []


def test_a_view_holds_what_it_looks_at_and_takes_nothing() -> None:
    """r0 -> view; part 0: g0 of r1; part 1: g1 of the view."""
    values = (
        Value(0, "r0", UNIT, None),
        Value(1, "r1", UNIT, None),
        Value(2, "view", UNIT, 0),
        Value(3, "g0", UNIT, 1),
        Value(4, "g1", UNIT, 2),
    )
    ops = (
        Op(0, "torch.aten.t", OpKind.VIEW, (0,), (2,)),
        Op(1, "torch.aten.cumsum", OpKind.REDUCTION, (1,), (3,)),
        Op(2, "torch.aten.cumsum", OpKind.REDUCTION, (2,), (4,)),
    )
    parts = CutFunction(JointGraph(values, ops, (0, 1), frozenset(), (), (3, 4)), ((0, 1), (2,)), frozenset({0, 1}))
    assert parts.peak(0, 1) == 3 * UNIT  # r0, r1, g0
    assert parts.peak(1, 2) == 3 * UNIT  # r0, by its view, and both gradients


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cuts_keep_within_the_target_with_fewer_stages(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, 7)
    parts = chain(count)
    sizes = [draw.randint(1, 9) * UNIT for _ in range(2 * count)]
    values = tuple(Value(v.id, v.name, sizes[v.id], v.producer) for v in parts.graph.values)
    graph = JointGraph(values, parts.graph.ops, parts.graph.arguments, frozenset(), (), parts.graph.backward_results)
    parts = CutFunction(graph, parts.ops, parts.freed)
    floor = draw.randint(parts.least_peak, parts.whole_peak)
    (cuts,) = find_cuts([parts], floor=floor)

    def peak(chosen: tuple[int, ...]) -> int:
        return max(parts.peak(a, b) for a, b in zip((0, *chosen), (*chosen, count), strict=True))

    target = max(floor, int(parts.least_peak * 1.02))
    assert peak(cuts) <= max(target, parts.least_peak)
    fewer = (c for n in range(len(cuts)) for c in combinations(range(1, count), n))
    assert all(peak(c) > target for c in fewer)


def forward_chain(sizes: list[int]) -> CutFunction:
    """A forward each of whose reductions takes what the one before gives, and gives a residual; all of them move."""
    values = [Value(0, "x", UNIT, None)]
    values += [Value(n + 1, f"r{n}", size, n) for n, size in enumerate(sizes)]
    ops = tuple(Op(n, "torch.aten.cumsum", OpKind.REDUCTION, (n,), (n + 1,)) for n in range(len(sizes)))
    results = tuple(range(1, len(values)))
    graph = JointGraph(tuple(values), ops, (0,), frozenset(op.id for op in ops), results, ())
    return CutFunction(graph, tuple((n,) for n in range(len(sizes))), moved=frozenset(results))


def backward_chain(sizes: list[int]) -> CutFunction:
    parts = chain(len(sizes))
    made = [Value(v.id, v.name, sizes[v.id] if v.producer is None else UNIT, v.producer) for v in parts.graph.values]
    graph = JointGraph(
        tuple(made), parts.graph.ops, parts.graph.arguments, frozenset(), (), parts.graph.backward_results
    )
    return CutFunction(graph, parts.ops, parts.freed, moved=parts.freed)


def plan_of(parts: CutFunction, cuts: tuple[int, ...]) -> tuple[StagePlan, dict[str, list[int]]]:
    """The plan of the stages, with its moves, and the bytes of what each stage gives."""
    graph, steps, sizes = parts.graph, [], {}
    for number, (first, end) in enumerate(pairwise((0, *cuts, len(parts)))):
        ops = [graph.ops[op] for part in parts.ops[first:end] for op in part]
        given = [v for op in ops for v in op.results]
        taken = dict.fromkeys(v for op in ops for v in op.operands if v not in given)
        steps.append(RunStage(f"s{number}", tuple(map(str, taken)), tuple(map(str, given))))
        sizes[f"s{number}"] = [graph.values[v].bytes for v in given]
    results = tuple(map(str, (*graph.forward_results, *graph.backward_results)))
    plan = insert_frees(StagePlan(tuple(map(str, graph.arguments)), tuple(steps), results))
    if graph.forward_results:
        return offload_results(plan, {str(v) for v in parts.moved}), sizes
    return fetch_arguments(plan, {str(v): graph.values[v].bytes for v in parts.moved}), sizes


def peak_of(parts: CutFunction, cuts: tuple[int, ...]) -> int:
    stages = list(pairwise((0, *cuts, len(parts))))
    leaving = [0, *(parts.leaving(*stage) for stage in stages[:-1])]
    coming = [*(parts.coming(*stage) for stage in stages[1:]), 0]
    return max(parts.peak(*s) + out + back for s, out, back in zip(stages, leaving, coming, strict=True))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("make", [forward_chain, backward_chain])
def test_what_moves_counts_as_the_plan_that_moves_it_says(make: Callable[[list[int]], CutFunction], seed: int) -> None:
    draw = random.Random(seed)
    parts = make([draw.randint(1, 9) * UNIT for _ in range(draw.randint(2, 8))])
    for _ in range(5):
        cuts = tuple(sorted(draw.sample(range(1, len(parts)), draw.randint(0, len(parts) - 1))))
        assert peak_of(parts, cuts) == plan_peak(*plan_of(parts, cuts), {})
    assert parts.least_peak == peak_of(parts, tuple(range(1, len(parts))))
    for floor in (0, draw.randint(0, parts.whole_peak)):
        (chosen,) = find_cuts([parts], floor=floor)
        assert peak_of(parts, chosen) <= max(floor, int(parts.least_peak * 1.02))


def test_moved_residuals_take_two_stages_worth_at_a_time() -> None:
    # Held are a residual of 4 on its way, the next, and gradients of 1.
    assert forward_chain([4 * UNIT] * 8).least_peak == 8 * UNIT
    assert forward_chain([4 * UNIT] * 8).whole_peak == 32 * UNIT
    assert backward_chain([4 * UNIT] * 8).least_peak == 7 * UNIT + 8 * UNIT
    # A stage of five leaves while one of one runs, and that while one of two does.
    assert find_cuts([forward_chain([4 * UNIT] * 8)], floor=24 * UNIT) == [(5, 6)]


def test_runs_end_behind_what_ends_them_and_the_last_takes_the_rest() -> None:
    assert split_behind([3, 1, 4, 5, 9], {1, 5}) == ((3, 1), (4, 5, 9))
    assert split_behind([3, 1], {1}) == ((3, 1),)
    assert split_behind([3], ()) == ((3,),)
    assert split_behind([], {1}) == ()
