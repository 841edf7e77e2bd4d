# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Peaks of memory and times of backward passes at a range of memory budgets, beside eager PyTorch and Inductor."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
from measure import WARM_UP_STEPS, Contender, eager, first_line, gradients, inductor, run_step, time_in_turn
from models import MODELS, Case
from torch._functorch import config as functorch_config

import retrograd
from retrograd.contract.roles import BACKWARD, FORWARD
from retrograd.runtime.reports.report import Report
from retrograd.runtime.steps.bound_function import BoundFunction
from retrograd.runtime.steps.compiled import CompiledBackward

# Of the models that the memory of training is mostly activations of, at sizes that compile in a minute.
SIZES: dict[str, Mapping[str, int]] = {
    "mlp": {"batch": 4096, "features": 256, "hidden": 256, "classes": 10},
    "resnet18": {"batch": 8, "stages": 3, "blocks": 2, "width": 16, "image": 64, "classes": 10},
    "gpt2": {"batch": 8, "tokens": 64, "width": 64, "heads": 4, "layers": 12, "vocabulary": 256},
    "vit": {"batch": 16, "image": 32, "patch": 4, "width": 64, "heads": 4, "layers": 6, "classes": 10},
    "unet": {"batch": 4, "depth": 2, "width": 8, "image": 64, "classes": 4},
    "lstm": {"batch": 64, "steps": 16, "features": 32, "hidden": 64, "classes": 10},
}
Scale = Literal["memory", "test", "bench"]


@dataclass(frozen=True)
class MemoryRow:
    """A model in one way: ``default``, ``min-cut``, a budget, or through PyTorch. Bytes and milliseconds; times are
    medians and, as ``best_ms``, the fastest. None is what there is not."""

    model: str
    how: str
    budget_bytes: int | None = None
    saved_bytes: int | None = None
    recomputed_flops: int | None = None
    peak_planned: int | None = None
    peak_predicted: int | None = None
    peak_measured: int | None = None
    backward_ms: float | None = None
    best_ms: float | None = None
    gradient_error: float | None = None
    note: str = ""


@dataclass
class MemoryResult:
    """The rows of a model, and by partition the reports that timelines are drawn from."""

    rows: list[MemoryRow] = field(default_factory=list)
    reports: dict[str, Report] = field(default_factory=dict)


def make_case(name: str, scale: Scale) -> Case:
    """The model at the size that this benchmark has for it, or at one of its own."""
    entry = MODELS[name]
    if scale != "memory":
        return entry.make(scale)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return entry.build(**SIZES[name])


def measure_model(
    name: str, case: Case, fractions: Sequence[float], repeats: int, say: Callable[[str], None], *, peers: bool
) -> MemoryResult:
    """Compile ``case`` for each partition and for budgets that are ``fractions`` of the peak that eager has, and
    measure peaks and, in turn, times."""
    result = MemoryResult()
    reference = {key: value.clone() for key, value in gradients(case, case.model).items()}
    contenders: list[Contender] = [eager(case)]
    if peers:
        contenders += compile_peers(name, case, result, say)
    compile_all(name, case, fractions, contenders, result, say)
    for contender in contenders:
        for _ in range(WARM_UP_STEPS):
            run_step(case, contender.call)
    say(f"{name}: timing {repeats} steps of each")
    time_in_turn(case, contenders, repeats)
    # What there is first, then what there is not.
    result.rows[:0] = [describe(name, case, c, reference, result) for c in contenders]
    return result


def compile_peers(name: str, case: Case, result: MemoryResult, say: Callable[[str], None]) -> list[Contender]:
    """Inductor as it is, and told to keep half of the activations."""
    found: list[Contender] = []
    for how, compiled in (("inductor", inductor), ("inductor, budget 0.5", halved_inductor)):
        say(f"{name}: compiling with {how}")
        try:
            found.append(dataclasses.replace(compiled(case), engine=how))
        except RuntimeError as error:
            result.rows.append(MemoryRow(name, how, note=first_line(error)))
    return found


def halved_inductor(case: Case) -> Contender:
    """Inductor with ``activation_memory_budget = 0.5``: a backend of its own, or Dynamo would take what is compiled.

    Raises:
        RuntimeError: it cannot compile.
    """
    # It takes longer to import than all else here.
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with functorch_config.patch(activation_memory_budget=0.5), inductor_config.patch(force_disable_caches=True):
            return compile_fx(graph, inputs)

    call = torch.compile(case.model, backend=backend)
    run_step(case, call)
    return Contender("inductor", call)


def compile_all(
    name: str,
    case: Case,
    fractions: Sequence[float],
    contenders: list[Contender],
    result: MemoryResult,
    say: Callable[[str], None],
) -> None:
    """Add what retrograd makes of ``case``; a budget that cannot be met is taken as the least that can."""
    ways: list[tuple[str, dict[str, Any]]] = [(p, {"partition": p}) for p in ("default", "min-cut")]
    ways += [(f"{p}, free early", {"partition": p, "free_early": True}) for p in ("default", "min-cut")]
    ways += [(f"budget {f:g}", {"partition": "budget", "memory_budget": f}) for f in fractions]
    least: int | None = None
    for how, options in ways:
        if least is not None:
            # A smaller fraction is no more feasible.
            result.rows.append(MemoryRow(name, how, note=f"infeasible: the least is {least:,} B"))
            continue
        say(f"{name}: compiling with {how}")
        try:
            step = retrograd.compile_backward(case.model, case.args, **options)
        except retrograd.InfeasibleBudget as error:
            least = error.least
            result.rows.append(MemoryRow(name, how, error.budget, note=f"infeasible: the least is {least:,} B"))
            how = "budget, the least"
            step = retrograd.compile_backward(case.model, case.args, partition="budget", memory_budget=least)
        contenders.append(Contender(how, step, report=lambda step=step: step.explain().to_dict()))  # type: ignore[misc]


def describe(
    name: str, case: Case, contender: Contender, reference: Mapping[str, torch.Tensor], result: MemoryResult
) -> MemoryRow:
    """A contender's row, once its steps are timed."""
    median, best = 1e3 * statistics.median(contender.backward), 1e3 * min(contender.backward)
    error = max_error(gradients(case, contender.call), reference)
    if not isinstance(contender.call, CompiledBackward):
        row = MemoryRow(name, contender.engine, peak_measured=torch_peak(case, contender.call), note=contender.note)
    else:
        report = contender.report()
        result.reports[contender.engine] = contender.call.explain()
        row = MemoryRow(
            name,
            contender.engine,
            report.get("memory_budget"),
            report["saved_bytes"],
            report["recomputed_flops"],
            report["peak_bytes_planned"],
            report["peak_bytes_predicted"],
            report["peak_bytes_measured"] or _beside_torch(case, contender.call),
        )
    return dataclasses.replace(row, backward_ms=median, best_ms=best, gradient_error=error)


def _beside_torch(case: Case, step: CompiledBackward) -> int:
    """As :func:`held_beside_scratch`, of the second run of a step, from gradients that there are not yet."""
    return _step_peak(case, lambda: run_step(case, step), partial(held_beside_scratch, step))


def held_beside_scratch(step: CompiledBackward, run: Callable[[], object]) -> int:
    """The most bytes that ``run``, which calls a compiled step on a CPU, holds at a time, by torch's profiler: while a
    compiled function runs, torch's allocator holds as much as its scratch memory. What the caller lets go of between
    the halves is not there any more, as in eager. Copies of small tensors that calls keep are not made."""
    halves = step.explain().to_dict()["timeline"]
    left = [stage["scratch"] for half in (FORWARD, BACKWARD) for stage in halves[half]]
    invoke = BoundFunction._invoke

    def beside_scratch(function: BoundFunction, arguments: Any, results: Any) -> Any:
        scratch = torch.empty(left.pop(0), dtype=torch.uint8)
        found = invoke(function, arguments, results)
        del scratch
        return found

    step._parts.program.short_calls.clear()
    with mock.patch.object(BoundFunction, "_invoke", beside_scratch):
        held = held_at_most(run)
    if left:
        raise AssertionError("a function of the step was not called: its scratch memory is not counted")
    return held


def max_error(found: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of gradients, relative to the norm of each; those that are zero but for rounding left
    out."""
    zero = 1e-6 * max(float(g.norm()) for g in reference.values())
    return max(
        float((found[key] - expected).norm() / expected.norm())
        for key, expected in reference.items()
        if float(expected.norm()) > zero
    )


def torch_peak(case: Case, call: Callable[..., Any]) -> int:
    """The most bytes that one step takes from torch's allocator and holds at a time, by its profiler.

    What libraries like oneDNN allocate by themselves, as to pack the operands of a product, is not in it.
    """
    return _step_peak(case, lambda: run_step(case, call))


def _step_peak(
    case: Case, run: Callable[[], object], measure: Callable[[Callable[[], object]], int] | None = None
) -> int:
    """The most bytes that the second run of a step holds, from gradients that there are not yet."""
    run()
    for leaf in case.leaves().values():
        leaf.grad = None
    return (measure or held_at_most)(run)


def _held_on_gpu(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def held_at_most(run: Callable[[], object]) -> int:
    """The most bytes that ``run`` takes from torch's allocator and holds at a time: of a GPU where one is in use, by
    its count, or of the CPU, by torch's profiler."""
    gc.collect()
    if torch.cuda.is_initialized():
        return _held_on_gpu(run)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        run()
    results: Any = profiler.profiler
    events = [(e.start_ns(), e.nbytes()) for e in results.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for _, size in sorted(events):
        held += size
        peak = max(peak, held)
    return peak
