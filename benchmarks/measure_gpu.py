# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Measures one model on a device in one precision: eager PyTorch, `torch.compile` and retrograd, in turn.

Compilation is done beforehand, by processes of their own (`compile_all`), into the caches of both compilers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from measure import first_line, left_to_eager, no_garbage_collection
from models import MODELS, Case, Size
from models.precision import Precision, convert
from torch import Tensor

import retrograd

ENGINES = ("eager", "inductor", "retrograd")
WARM_UP_STEPS = 3


class Job(NamedTuple):
    """What is compiled: one model of the registry in one precision through one engine."""

    model: str
    size: Size
    device: str
    precision: Precision
    engine: str

    def make(self) -> Case:
        return convert(MODELS[self.model].make(self.size), self.device, self.precision)


@dataclass(frozen=True)
class GpuRow:
    """One model in one precision through one engine. Times in milliseconds are medians; None is what could not be had.

    ``ratio`` is the time of forward and backward to eager's. ``peak_bytes`` is the most that a step has allocated
    beyond what was allocated before it. ``gradient_error`` is the largest relative error, in the norm, of a gradient
    from eager's in float32.
    """

    model: str
    precision: str
    engine: str
    forward_ms: float | None = None
    backward_ms: float | None = None
    ratio: float | None = None
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    gradient_error: float | None = None
    note: str = ""


@dataclass
class Runner:
    """A compiled model with the times of its steps, in seconds; ``scratch`` are bytes that its forward and backward
    take from an allocator that is not torch's."""

    engine: str
    call: Callable[..., Any]
    scratch: tuple[int, int] = (0, 0)
    note: str = ""
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median time of a whole step, in seconds."""
        return statistics.median(map(sum, zip(self.forward, self.backward, strict=True)))


def prepare(engine: str, case: Case) -> Runner:
    """``case`` through an engine, compiled, or loaded from the engine's cache.

    Raises:
        RuntimeError: it cannot be compiled.
    """
    if engine == "eager":
        return Runner(engine, case.model)
    if engine == "inductor":
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        call = torch.compile(case.model)
        run_step(case, call)
        return Runner(engine, call, note=left_to_eager(torch._dynamo.utils.counters))
    step = retrograd.compile_backward(case.model, case.args)
    report = step.explain().to_dict()
    return Runner(engine, step, (report["forward_transient_bytes"], report["backward_transient_bytes"]))


def compile_all(jobs: Iterable[Job], processes: int, say: Callable[[str], None]) -> dict[Job, float | str]:
    """Seconds that each job took to compile, in a process of its own, ``processes`` at a time; or why it failed."""
    context = multiprocessing.get_context("spawn")
    found: dict[Job, float | str] = {}
    with ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=1) as pool:
        asked = {job: pool.submit(compile_one, job) for job in jobs}
        for job, answer in asked.items():
            found[job] = answer.result()
            say(f"{job.model}, {job.precision}, {job.engine}: {describe(found[job])}")
    return found


def describe(outcome: float | str) -> str:
    """What came of compiling, in words."""
    return outcome if isinstance(outcome, str) else f"compiled in {outcome:.1f} s"


def compile_one(job: Job) -> float | str:
    """Seconds that one job takes to compile, the first step of Inductor's included, in which it does; or why not."""
    case = job.make()
    synchronizer(case)()
    start = time.perf_counter()
    try:
        prepare(job.engine, case)
    except RuntimeError as error:
        return f"failed: {first_line(error)}"
    return time.perf_counter() - start


def measure(
    model: str, size: Size, device: str, precision: Precision, compiled: Mapping[Job, float | str], repeats: int
) -> list[GpuRow]:
    """Time ``repeats`` steps of each engine, in turn; one row per engine. ``compiled`` is what came of compiling."""
    case = Job(model, size, device, precision, "eager").make()
    outcomes = {engine: compiled.get(Job(model, size, device, precision, engine)) for engine in ENGINES}
    runners, notes = warm_up(case, outcomes)
    exact = gradients(Job(model, size, device, "f32", "eager").make())
    errors = {runner.engine: difference(gradients(case, runner.call), exact) for runner in runners}
    peaks = {runner.engine: measure_peak(case, runner) for runner in runners}
    time_in_turn(case, runners, repeats)
    baseline = runners[0].median
    rows = [GpuRow(model, precision, engine, note=note) for engine, note in notes.items()]
    for runner in runners:
        seconds = outcomes[runner.engine]
        rows.append(
            GpuRow(
                model,
                precision,
                runner.engine,
                forward_ms=1e3 * statistics.median(runner.forward),
                backward_ms=1e3 * statistics.median(runner.backward),
                ratio=runner.median / baseline,
                compile_seconds=seconds if isinstance(seconds, float) else None,
                peak_bytes=peaks[runner.engine],
                gradient_error=errors[runner.engine],
                note=runner.note,
            )
        )
    return sorted(rows, key=lambda row: ENGINES.index(row.engine))


def warm_up(case: Case, outcomes: Mapping[str, float | str | None]) -> tuple[list[Runner], dict[str, str]]:
    """What can be timed, after some steps, eager first; and why the rest cannot."""
    runners: list[Runner] = []
    notes: dict[str, str] = {}
    for engine, outcome in outcomes.items():
        if isinstance(outcome, str) or (outcome is None and engine != "eager"):
            notes[engine] = outcome or "left out"
            continue
        try:
            runner = prepare(engine, case)
            for _ in range(WARM_UP_STEPS):
                run_step(case, runner.call)
        except RuntimeError as error:
            notes[engine] = f"failed: {first_line(error)}"
        else:
            runners.append(runner)
    return runners, notes


def time_in_turn(case: Case, runners: Sequence[Runner], repeats: int) -> None:
    """Time steps of all runners, each round beginning with another: a slow spell of the machine meets all."""
    with no_garbage_collection():
        for turn in range(repeats):
            first = turn % len(runners)
            for runner in (*runners[first:], *runners[:first]):
                forward, backward = run_step(case, runner.call)
                runner.forward.append(forward)
                runner.backward.append(backward)


@dataclass(frozen=True)
class EnabledModel:
    """A model in eager whose backward runs inside of `retrograd.enable()`."""

    model: Callable[..., Any]
    scope: Callable[[], AbstractContextManager[Any]] = retrograd.enable

    def __call__(self, *args: Any) -> Any:
        return self.model(*args)


def run_step(case: Case, call: Callable[..., Any], between: Callable[[], None] = lambda: None) -> tuple[float, float]:
    """A step from scratch: seconds in the forward (with the loss) and in the backward, each until the device is done.

    ``between`` is called after the forward.
    """
    for leaf in case.leaves().values():
        leaf.grad = None
    synchronize = synchronizer(case)
    synchronize()
    start = time.perf_counter()
    loss = case.loss(call(*case.args))
    synchronize()
    forward = time.perf_counter() - start
    between()
    scope = call.scope if isinstance(call, EnabledModel) else contextlib.nullcontext
    start = time.perf_counter()
    with scope():
        loss.backward()
    synchronize()
    return forward, time.perf_counter() - start


def synchronizer(case: Case) -> Callable[[], None]:
    """What waits for the case's device. To look which that is takes the host a fifth of a millisecond."""
    is_cuda = any(leaf.is_cuda for leaf in case.leaves().values())
    return torch.cuda.synchronize if is_cuda else lambda: None


def gradients(case: Case, call: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    """The gradients of one step, by name; of eager where no ``call`` is given."""
    run_step(case, case.model if call is None else call)
    # A model under autocast is inside of another module.
    return {n.removeprefix("inner."): leaf.grad for n, leaf in case.leaves().items() if leaf.grad is not None}


def difference(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """The largest relative error of a gradient, in the norm; gradients that are zero but for rounding do not count."""
    if found.keys() != exact.keys():
        raise AssertionError(f"gradients for {sorted(found)}, expected {sorted(exact)}")
    floor = 1e-5 * max(float(gradient.norm()) for gradient in exact.values())
    return max(
        float((found[name].double() - gradient.double()).norm() / gradient.double().norm())
        for name, gradient in exact.items()
        if gradient.norm() > floor
    )


def measure_peak(case: Case, runner: Runner) -> int | None:
    """The most bytes of a step beyond those before it: torch's, and the scratch memory of each half where that is not
    torch's; ``None`` on a device that keeps no count."""
    if not any(leaf.is_cuda for leaf in case.leaves().values()):
        return None
    for leaf in case.leaves().values():
        leaf.grad = None
    before = torch.cuda.memory_allocated()
    peaks: list[int] = []

    def read() -> None:
        peaks.append(torch.cuda.max_memory_allocated() - before)
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.reset_peak_memory_stats()
    run_step(case, runner.call, read)
    read()
    return max(peak + scratch for peak, scratch in zip(peaks, runner.scratch, strict=True))
