# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Random joint graphs: the cut is the cheapest that there is, and halves give what the whole gives."""

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

import pytest
from graph_text import parse_graph

from retrograd.pipelines.analysis.kernels.liveness import Peaks
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.min_cut import find_cut, find_min_cut_partition, find_weights
from retrograd.pipelines.analysis.partition.op_kinds import OpKind
from retrograd.pipelines.analysis.partition.partition_plan import PartitionPlan, find_default_partition, find_unsavable
from retrograd.pipelines.analysis.partition.policies import POLICIES
from retrograd.pipelines.analysis.partition.recompute_bans import MinCutOptions, find_banned
from retrograd.pipelines.analysis.partition.schedule import schedule_plan

KINDS = [kind.value for kind in OpKind if kind is not OpKind.CONSTANT]
FREE = (OpKind.CONSTANT, OpKind.VIEW)
# Nothing but the cut: what must not run twice stays banned.
BARE = MinCutOptions(
    ban_compute=False,
    ban_reductions=False,
    ban_scatter=False,
    ban_materialized=False,
    ban_far_apart=False,
    ban_long_chains=False,
    distance_base=1.0,
)
EAGER = MinCutOptions(max_distance=2, max_chain=2, max_backward_distance=3, distance_base=1.3)


def random_graph(seed: int, *, ops: int, unit: int = 1) -> JointGraph:
    """A joint graph of `ops` ops, of sizes up to 40 times `unit` bytes, some of them 0."""
    chance = random.Random(seed)
    arguments = [f"a{i}" for i in range(chance.randint(1, 3))]
    lines = [f"{chance.choice(['input', 'input', 'mutated'])} {a} {chance.randint(0, 40) * unit}" for a in arguments]
    lines += [f"tangent t{i} {unit}" for i in range(chance.randint(1, 2))]
    primal, every = list(arguments), [*arguments, *(f"t{i}" for i in range(len(lines) - len(arguments)))]
    for number in range(ops):
        if chance.random() < 0.1:
            lines.append(f"c{number} = constant -")
            primal.append(f"c{number}")
            every.append(f"c{number}")
            continue
        late = number > ops // 2
        taken = chance.choices(every if late else primal, k=chance.randint(1, 3))
        results = [f"v{number}_{i}" for i in range(chance.choice([1, 1, 1, 2]))]
        sizes = [str(chance.randint(0, 40) * unit) for _ in results]
        lines.append(" ".join([*results, "=", chance.choice(KINDS), *taken, *sizes]))
        if set(taken) <= set(primal):
            primal += results
        every += results
    tensors = [name for name in every if not name.startswith("c")]
    outputs = [name for name in primal if not name.startswith("c")]
    lines.append(" ".join(["forward", *chance.choices(outputs, k=chance.randint(1, 3))]))
    lines.append(" ".join(["backward", *tensors[-1:], *chance.choices(tensors, k=chance.randint(1, 3))]))
    return parse_graph("\n".join(lines))


def lightest(graph: JointGraph, banned: frozenset[int], weights: list[float]) -> float:
    """The least weight of values to save, by trying all sets of them."""
    candidates = [
        value.id
        for value in graph.values
        if value.is_tensor
        and (value.producer is not None or value.id in graph.mutated)
        and value.producer not in graph.tangent_ops
    ]
    sets = (set(chosen) for size in range(len(candidates) + 1) for chosen in combinations(candidates, size))
    return min(sum(weights[v] for v in chosen) for chosen in sets if is_enough(graph, chosen, banned))


def is_enough(graph: JointGraph, chosen: set[int], banned: frozenset[int]) -> bool:
    """Whether the backward can run on `chosen`, the arguments that are left and the tangents, with no banned op."""
    needed = graph.required_ops(graph.backward_results, chosen)
    used = {o for op in needed for o in graph.ops[op].operands} | set(graph.backward_results)
    return not needed & banned and not (used & graph.mutated) - chosen


@pytest.mark.parametrize("seed", range(60))
def test_no_set_of_saved_values_is_lighter(seed: int) -> None:
    graph = random_graph(seed, ops=random.Random(seed).randint(3, 12))
    banned, weights = find_banned(graph, BARE), find_weights(graph, BARE)
    cut = find_cut(graph, banned, BARE)
    assert is_enough(graph, set(cut), banned)
    assert sum(weights[v] for v in cut) == lightest(graph, banned, weights)


@pytest.mark.parametrize("seed", range(100, 130))
def test_no_set_of_saved_values_is_lighter_with_heuristics(seed: int) -> None:
    # Sizes by the thousand: capacities are whole numbers, and a factor of the distance leaves a fraction.
    graph = random_graph(seed, ops=10, unit=1000)
    banned, weights = find_banned(graph, EAGER), find_weights(graph, EAGER)
    cut = find_cut(graph, banned, EAGER)
    assert is_enough(graph, set(cut), banned)
    assert sum(weights[v] for v in cut) == pytest.approx(lightest(graph, banned, weights), rel=1e-3)


def evaluate(graph: JointGraph, ops: Iterable[int], known: dict[int, int], wanted: Iterable[int]) -> dict[int, int]:
    """Run ops that each give a number made of their own and of what they were given; fails where that is not there."""
    known = dict(known)
    for op in (graph.ops[number] for number in ops):
        term = hash((op.id, *(known[o] for o in op.operands)))
        for place, result in enumerate(op.results):
            known.setdefault(result, hash((term, place)))
    return {value: known[value] for value in wanted}


def check_halves(graph: JointGraph, plan: PartitionPlan) -> None:
    """Run the forward on what it has, then the backward on what that leaves; compare with the whole in one go."""
    arguments = {a: hash(("argument", a)) for a in graph.arguments}
    primals = {a: term for a, term in arguments.items() if a not in graph.tangents}
    left = {a: term for a, term in arguments.items() if a not in graph.mutated}
    forward = evaluate(graph, plan.forward, primals, (*graph.forward_results, *plan.saved))
    saved = {v: forward[v] for v in plan.saved}
    backward = evaluate(graph, plan.backward, left | saved, graph.backward_results)
    whole = evaluate(graph, range(len(graph.ops)), arguments, (*graph.forward_results, *graph.backward_results))
    assert forward | backward == whole | saved
    assert all(graph.values[v].is_tensor for v in plan.saved)
    twice = set(plan.forward) & set(plan.backward)
    assert not any(graph.ops[op].kind in (OpKind.RANDOM, OpKind.OPAQUE) for op in twice)
    assert plan.recomputed == tuple(op for op in sorted(twice) if graph.ops[op].kind not in FREE)


@pytest.mark.parametrize("seed", range(200, 300))
def test_halves_give_what_the_whole_gives(seed: int) -> None:
    graph = random_graph(seed, ops=30)
    for plan in (
        find_default_partition(graph),
        find_min_cut_partition(graph),
        find_min_cut_partition(graph, BARE),
        find_min_cut_partition(graph, EAGER),
    ):
        assert find_unsavable(graph, plan) is None
        check_halves(graph, plan)


def test_the_policy_has_no_higher_peak_than_default() -> None:
    lower = replaced = 0
    for seed in range(300, 400):
        graph = random_graph(seed, ops=30)
        plain, default = find_min_cut_partition(graph), find_default_partition(graph)
        plan = POLICIES["min-cut"].decide(graph).plan
        peaks = [Peaks(graph).least(schedule_plan(graph, p)) for p in (plan, plain, default)]
        assert peaks[0] <= peaks[2] or not plan.recomputed
        assert plan == plain if peaks[1] <= peaks[2] else plan == replace(default, policy="min-cut") or plan == plain
        lower += peaks[0] < peaks[2]
        replaced += plan != plain
    # Both happen.
    assert lower > 5
    assert replaced > 5
