# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is saved and what is recomputed: retrograd's policies beside PyTorch's partitioners, on the same joint graphs.

    python benchmarks/partition_comparison.py [--models NAME ...] [--size bench] [--json FILE] [--markdown FILE]

Each partitioner decides on the graph that was captured; every decision is then judged by the same measure: bytes saved
(parameters and inputs are alive anyway and count nothing), the peak of live bytes that ``liveness`` predicts for it,
with recomputation at its lowest schedule, and the FLOPs and seconds that are recomputed. Nothing is compiled or run.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import MODELS, SIZES, Case
from torch._functorch import config, partitioners

from retrograd.dialects import ir
from retrograd.frontend.capture import CapturedGraph, capture_joint
from retrograd.frontend.importer import import_graph
from retrograd.pipelines.analysis.budget import BudgetOptions, find_curve
from retrograd.pipelines.analysis.graph import JointGraph
from retrograd.pipelines.analysis.liveness import compute_peak
from retrograd.pipelines.analysis.min_cut import find_min_cut_partition
from retrograd.pipelines.analysis.partition_plan import PartitionPlan, find_default_partition, plan_from_saved
from retrograd.pipelines.analysis.read_graph import read_joint
from retrograd.pipelines.analysis.recompute_cost import CostModel, Device
from retrograd.pipelines.analysis.schedule import find_low_schedule
from retrograd.pipelines.transforms.bwd_cse import BwdCse, read_merged
from retrograd.pipelines.transforms.bwd_partition import JOINT, find_function, resolve_marks

COMPARED = ("mlp", "resnet18", "gpt2", "vit", "unet", "lstm")
Policy = Callable[[JointGraph], PartitionPlan]
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
    that the backward takes longer."""

    model: str
    engine: str
    policy: str
    budget: float | None
    saved_bytes: int
    peak_bytes: int
    recomputed_flops: int
    recompute_seconds: float
    seconds: float


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
    """Every policy of both sides on one joint graph; and what retrograd saves least, if it may recompute as many FLOPs
    as PyTorch's min-cut does and no more."""
    theirs = list(_compare_torch(problem))
    (cut,) = (row for row in theirs if row.policy == "min-cut")
    return [*theirs, *_compare_retrograd(problem), find_equal_flops(problem, cut.recomputed_flops)]


def find_equal_flops(problem: Problem, flops: int) -> Row:
    """The decision of least bytes saved among those that recompute at most ``flops``, for a device whose time is spent
    on arithmetic alone."""
    graph = problem.retrograd.graph
    options = BudgetOptions(cost=CostModel(Device(flops=1.0, bytes=math.inf)))
    curve, seconds = _timed(lambda: find_curve(graph, options))
    plans = [find_min_cut_partition(graph), *(point.plan for point in curve.points)]
    plan = min((p for p in plans if p.recomputed_flops <= flops), key=lambda p: p.saved_bytes)
    return _judge(problem.name, graph, "retrograd", "equal FLOPs", None, plan, seconds)


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
    highest = compute_peak(graph, find_default_partition(graph)).bytes
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
    peak = min(compute_peak(graph, p).bytes for p in (plan, dataclasses.replace(plan, backward=order)))
    cost = CostModel().total(graph, plan.recomputed)
    return Row(model, engine, policy, budget, plan.saved_bytes, peak, plan.recomputed_flops, cost, seconds)


def format_rows(rows: Sequence[Row]) -> str:
    """A markdown table."""
    lines = [
        "| model | partitioner | budget | saved | peak | FLOPs recomputed | ms recomputed | seconds to decide |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        budget = "" if row.budget is None else f"{row.budget:.2f}"
        lines.append(
            f"| {row.model} | {row.engine} `{row.policy}` | {budget} | {row.saved_bytes:,} | {row.peak_bytes:,} "
            f"| {row.recomputed_flops:,} | {1e3 * row.recompute_seconds:.2f} | {row.seconds:.3f} |"
        )
    return "\n".join(lines)


def main(arguments: Iterable[str] | None = None) -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=COMPARED)
    parser.add_argument("--size", choices=SIZES, default="bench")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(None if arguments is None else list(arguments))
    rows: list[Row] = []
    for name in options.models:
        problem = make_problem(name, MODELS[name].make(options.size))
        print(f"{name}: {len(problem.retrograd.graph.ops)} ops", file=sys.stderr)
        rows += compare_partitions(problem)
    table = format_rows(rows)
    print(table)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(table + "\n")


if __name__ == "__main__":
    main()
