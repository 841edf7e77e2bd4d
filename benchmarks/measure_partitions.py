# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decisions on what to save, of retrograd's policies and PyTorch's partitioners, on the same joint graphs.

Each partitioner decides on the graph that was captured; every decision is then judged by the same measure. Nothing is
compiled or run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from models import MODELS, Case
from torch._functorch import config, partitioners

from retrograd.contract.roles import JOINT
from retrograd.dialects import ir
from retrograd.frontend.doors.capture import CapturedGraph, capture_joint
from retrograd.frontend.preparation.importer import import_graph
from retrograd.pipelines.analysis.kernels.liveness import Peaks
from retrograd.pipelines.analysis.partition.budget import find_curve
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.min_cut import find_cut, find_min_cut_partition
from retrograd.pipelines.analysis.partition.partition_plan import (
    PartitionPlan,
    find_default_partition,
    find_unsavable,
    plan_from_saved,
)
from retrograd.pipelines.analysis.partition.policies import POLICIES, WithinBudget
from retrograd.pipelines.analysis.partition.policies import Policy as PolicyValue
from retrograd.pipelines.analysis.partition.read_graph import read_joint
from retrograd.pipelines.analysis.partition.recompute_bans import MinCutOptions, find_banned
from retrograd.pipelines.analysis.partition.recompute_cut import CostModel
from retrograd.pipelines.analysis.partition.recompute_program import LeastSaved
from retrograd.pipelines.analysis.partition.schedule import find_low_schedule
from retrograd.pipelines.infra.functions import find_function
from retrograd.pipelines.infra.runner import run_passes
from retrograd.pipelines.stages.stage_steps import STAGES, passes_of
from retrograd.pipelines.transforms.helpers.joint_checks import resolve_marks
from retrograd.pipelines.transforms.torch.bwd_cse import BwdCse, read_merged
from retrograd.pipelines.transforms.torch.bwd_partition import BwdPartition

Policy = Callable[[JointGraph], PartitionPlan]
# Of the integer program for the fewest bytes, in deterministic seconds.
_EFFORT = 2.0
TENTHS = tuple(step / 10 for step in range(11))


@dataclass(frozen=True)
class View:
    """A joint graph after common subexpressions were merged, one side's way. ``merged`` names, for each FX node that
    was found to be another's equal, that other."""

    graph: JointGraph
    merged: Mapping[str, str]


@dataclass(frozen=True)
class Problem:
    """A joint graph to partition. PyTorch merges common subexpressions of both halves before its min-cut, retrograd
    those of each half."""

    name: str
    joint: torch.fx.GraphModule
    num_forward_outputs: int
    torch: View
    retrograd: View


@dataclass(frozen=True)
class Row:
    """One decision. ``budget`` is PyTorch's ``activation_memory_budget``, or for retrograd the fraction of the default
    policy's peak that was allowed; ``seconds`` are what deciding took, ``recompute_seconds`` what the cost model says
    that the backward takes longer. ``equal_flops_bytes`` is what retrograd saves at the least if it recomputes no more
    FLOPs than this decision of PyTorch's."""

    model: str
    engine: str
    policy: str
    budget: float | None
    saved_bytes: int
    peak_bytes: int
    recomputed_flops: int
    recompute_seconds: float
    seconds: float
    equal_flops_bytes: int | None = None


@dataclass(frozen=True)
class Scale:
    """How long it took to decide on a large graph, of so many ops, by a policy or a solver; ``nodes`` are those of its
    flow network. ``seconds`` are those of the clock, ``cpu_seconds`` those of the processor."""

    what: str
    ops: int
    nodes: int | None
    seconds: float
    cpu_seconds: float


def make_problem(name: str, case: Case) -> Problem:
    """Capture the joint graph of ``case.model`` and read it as the partitioning pass does."""
    with contextlib.ExitStack() as stack:
        captured = capture_joint(stack, case.model, case.args, None)
        views = [_read(captured, across_halves) for across_halves in (True, False)]
    return Problem(name, captured.graph_module, captured.num_forward_outputs, *views)


def _read(captured: CapturedGraph, across_halves: bool) -> View:
    module = import_graph(captured.graph_module, captured.signature)
    with module.context, ir.Location.unknown():
        BwdCse(across_halves=across_halves).apply(module.operation)
        function = find_function(module.operation, JOINT)
        if function is None:
            raise ValueError("there is nothing to differentiate")
        return View(resolve_marks(read_joint(function)).graph, read_merged(module.operation))


def compare_partitions(problem: Problem) -> list[Row]:
    """Every policy of both sides on one joint graph."""
    rows = _with_equal_flops(problem.retrograd.graph, list(_compare_torch(problem)))
    return [*rows, *_compare_retrograd(problem)]


def _with_equal_flops(graph: JointGraph, rows: Sequence[Row]) -> list[Row]:
    """``rows`` of PyTorch's, each with the fewest bytes that retrograd's integer program finds for no more FLOPs."""
    program = LeastSaved(graph, [float(op.flops) for op in graph.ops])
    found: dict[int, PartitionPlan] = {}
    for flops in sorted({row.recomputed_flops for row in rows}):
        saved = program.solve(flops, _EFFORT)
        if saved is None:
            raise RuntimeError(f"no plan with {flops:,} FLOPs was found with the effort given to it")
        plan = plan_from_saved(graph, saved, "equal FLOPs")
        if plan.recomputed_flops > flops or find_unsavable(graph, plan) is not None:
            raise RuntimeError(f"the program's plan for {flops:,} FLOPs recomputes {plan.recomputed_flops:,}")
        found[flops] = plan
    return [dataclasses.replace(row, equal_flops_bytes=found[row.recomputed_flops].saved_bytes) for row in rows]


def _compare_torch(problem: Problem) -> Iterator[Row]:
    # The default partitioner takes the graph as it is.
    as_is = dataclasses.replace(problem, torch=problem.retrograd)
    plan, seconds = run_torch(as_is, partitioners.default_partition)
    yield _judge(problem.name, as_is.torch.graph, "torch", "default", None, plan, seconds)
    for budget in reversed(TENTHS):
        # A budget of 1 is the min-cut itself.
        policy = "min-cut" if budget == 1 else "budget"
        with config.patch(activation_memory_budget=budget):
            plan, seconds = run_torch(problem, partitioners.min_cut_rematerialization_partition)
        shown = None if budget == 1 else budget
        yield _judge(problem.name, problem.torch.graph, "torch", policy, shown, plan, seconds)


def _compare_retrograd(problem: Problem) -> Iterator[Row]:
    name, graph = problem.name, problem.retrograd.graph
    policies: dict[str, Policy] = {"default": find_default_partition, "min-cut": find_min_cut_partition}
    for policy, find in policies.items():
        plan, seconds = _timed(functools.partial(find, graph))
        yield _judge(name, graph, "retrograd", policy, None, plan, seconds)
    curve, seconds = _timed(lambda: find_curve(graph))
    highest = Peaks(graph).least(find_default_partition(graph))
    for budget in reversed(TENTHS):
        limit = round(budget * highest)
        if limit >= curve.points[-1].peak:
            yield _judge(name, graph, "retrograd", "budget", budget, curve.pick(limit).plan, seconds)
    least = curve.points[-1]
    yield _judge(name, graph, "retrograd", "budget", least.peak / highest, least.plan, seconds)


def run_torch(problem: Problem, partition: Callable[..., Any]) -> tuple[PartitionPlan, float]:
    """The plan of one of PyTorch's partitioners, and the seconds that it took to decide: of the min-cut its choice of
    values alone, without building the two graphs."""
    joint = torch.fx.GraphModule(problem.joint, copy.deepcopy(problem.joint.graph))
    with _deciding() as spent:
        start = time.perf_counter()
        _, backward = partition(joint, None, num_fwd_outputs=problem.num_forward_outputs)
        whole = time.perf_counter() - start
    graph, merged = problem.torch.graph, problem.torch.merged
    numbers = {value.name: value.id for value in graph.values}
    taken = [node.name for node in backward.graph.find_nodes(op="placeholder") if "tangents" not in node.name]
    saved = [numbers[merged.get(name, name)] for name in taken]
    return plan_from_saved(graph, hold_once(graph, saved), "torch"), sum(spent) if spent else whole


def hold_once(graph: JointGraph, saved: Iterable[int]) -> set[int]:
    """``saved``, where views share storage, by their storage: PyTorch keeps a view by keeping what it looks at, so
    that several views of one tensor, or views of an argument, hold its bytes once, or none. A view that is smaller
    than what it looks at counts as if it were a copy."""
    views: dict[int, set[int]] = {}
    for value in saved:
        views.setdefault(graph.view_root(value), set()).add(value)
    held: set[int] = set()
    for root, kept in views.items():
        is_smaller = sum(graph.values[v].bytes for v in kept) < graph.values[root].bytes
        held |= kept if is_smaller and graph.values[root].producer is not None else {root}
    return held


@contextlib.contextmanager
def _deciding() -> Iterator[list[float]]:
    """Adds up the seconds that the min-cut partitioner takes to choose."""
    spent: list[float] = []
    choose = partitioners.choose_saved_values_set

    def timed(*args: Any, **kwargs: Any) -> Any:
        chosen, seconds = _timed(lambda: choose(*args, **kwargs))
        spent.append(seconds)
        return chosen

    partitioners.choose_saved_values_set = timed
    try:
        yield spent
    finally:
        partitioners.choose_saved_values_set = choose


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def _judge(
    model: str, graph: JointGraph, engine: str, policy: str, budget: float | None, plan: PartitionPlan, seconds: float
) -> Row:
    order = find_low_schedule(graph, plan.backward, plan.saved)
    peak = min(Peaks(graph).least(p) for p in (plan, dataclasses.replace(plan, backward=order)))
    cost = CostModel().total(graph, plan.recomputed)
    return Row(model, engine, policy, budget, plan.saved_bytes, peak, plan.recomputed_flops, cost, seconds)


def measure_scale(layers: int) -> Iterator[Scale]:
    """A GPT of so many layers, partitioned by the passes of each policy, as a compilation does; and its minimum cut."""
    with torch.random.fork_rng(devices=[]):
        case = MODELS["gpt2"].build(batch=2, tokens=32, width=64, heads=4, layers=layers, vocabulary=128)
    with contextlib.ExitStack() as stack:
        captured = capture_joint(stack, case.model, case.args, None)
        module = import_graph(captured.graph_module, captured.signature)
        graph = _read(captured, across_halves=False).graph
    source, size = str(module), len(graph.ops)
    highest = Peaks(graph).least(find_default_partition(graph))
    chosen: list[PolicyValue] = [*POLICIES.values(), WithinBudget(highest)]
    for policy in chosen:
        passes = passes_of(STAGES["partitioned"], BwdPartition.by(policy))
        with module.context, ir.Location.unknown():
            copied = ir.Module.parse(source)
            run = functools.partial(run_passes, copied, passes)
            yield _measure(f"`{policy.name}`, all passes of the stage", size, None, run)
    banned = find_banned(graph, MinCutOptions())
    nodes = 2 * len(graph.values) + 2
    cut = functools.partial(find_cut, graph, banned, MinCutOptions())
    yield _measure("the flow network and its minimum cut", size, nodes, cut)


def _measure(what: str, ops: int, nodes: int | None, run: Callable[[], Any]) -> Scale:
    cpu = time.process_time()
    _, seconds = _timed(run)
    return Scale(what, ops, nodes, seconds, time.process_time() - cpu)
