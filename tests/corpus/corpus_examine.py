# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One program through one door, from its source to a verdict."""

from __future__ import annotations

import resource
import statistics
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from corpus_case import Program
from corpus_doors import REFUSALS, NotCompiledError, Opened, open_door
from corpus_steps import Steps, StepTime
from judge import Run, compare
from measure import no_garbage_collection
from measure_memory import held_at_most

from retrograd.frontend.verification.judgement import SHAKES

OUTCOMES = ("right", "ran", "wrong", "refused", "crashed")
# Of other inputs and other parameters than those that were compiled for, a turn each.
TURNS = (0, 1, 2)
# A step is compared as a whole, where a number at a kink of a ReLU may lie on either side: it does in few of these.
_SHAKES = 3 * SHAKES
# How far eager may be from float64, in all, for float64 to be a reference.
WORST_REFERENCE = 1e-3


@dataclass
class Verdict:
    """A program through a door: ``right`` where loss, gradients and buffers are those of float64 but for rounding;
    ``ran`` where random numbers leave nothing to compare; ``wrong``; ``refused`` with a reason; ``crashed`` where an
    error is no refusal, or the process ended, or ran out of time or memory.

    Times of steps are medians in milliseconds, ``ratio`` the step's to eager's and ``backward_ratio`` its backward's;
    ``compile_cpu`` are the seconds of
    processor time of compiling, all of its processes taken together. None is what there is not.
    """

    program: str
    family: str
    door: str
    outcome: str = "crashed"
    reason: str = ""
    islands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compile_seconds: float | None = None
    compile_cpu: float | None = None
    step_ms: float | None = None
    eager_ms: float | None = None
    ratio: float | None = None
    backward_ratio: float | None = None
    peak_bytes: int | None = None
    eager_peak_bytes: int | None = None
    resident_bytes: int | None = None
    total_seconds: float = 0.0
    commit: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def examine(program: Program, door: str, repeats: int) -> Verdict:
    """Compile a program, compare its steps with those of eager and of float64, and time ``repeats`` of them."""
    verdict, start = Verdict(program.name, program.family, door), time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # Products of float32 are compared with those of float64, not of TF32.
            torch.backends.cudnn.allow_tf32 = False
            sample = program.make()
            steps = Steps(sample)
            opened = open_door(door, sample, steps)
            verdict.compile_seconds, verdict.islands = round(opened.seconds, 2), opened.islands
            verdict.compile_cpu = round(opened.cpu_seconds, 2)
            problems = [] if sample.random else compare_steps(steps, opened)
            verdict.outcome = "wrong" if problems else "ran" if sample.random else "right"
            verdict.reason = "; ".join(problems)[:2000]
            if repeats:
                _time(steps, opened, repeats, verdict)
                _weigh(steps, opened, verdict)
            verdict.notes = opened.notes()
        except NotCompiledError as error:
            verdict.outcome, verdict.reason = "refused", str(error)
        except Exception as error:  # noqa: BLE001  (what it is goes into the table)
            verdict.outcome, verdict.reason = _describe(error)
    verdict.resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    verdict.total_seconds = round(time.monotonic() - start, 1)
    return verdict


def compare_steps(steps: Steps, opened: Opened) -> list[str]:
    """What is wrong with the steps of a program that was compiled, at the first turn where something is."""
    for turn in TURNS:
        compiled, eager, precise = steps.run(opened.call, turn, opened.around), steps.eager(turn), steps.precise(turn)
        check_reference(eager, precise)
        problems = compare(compiled, eager, precise)
        if problems:
            shaken: list[Run] = [steps.shaken(turn, seed) for seed in range(1, _SHAKES + 1)]
            problems = compare(compiled, eager, precise, shaken)
        if problems:
            return [f"turn {turn}: {len(problems)} values, {problems[0]}", *problems[1:]]
    return []


def check_reference(eager: Run, precise: Run) -> None:
    """That eager and float64 compute the same, and that it is finite: otherwise anything would be right.

    Raises:
        ValueError: there is nothing to compare with.
    """
    if not all(v is None or bool(v.isfinite().all()) for v in precise.values.values()):
        raise ValueError("a value is not finite in eager: no program to compare")
    norms = [
        (float((ours.double() - exact.double()).norm()), float(exact.double().norm()))
        for ours, exact in ((eager.values[name], value) for name, value in precise.values.items())
        if ours is not None and exact is not None
    ]
    apart, whole = (sum(n**2 for n in column) ** 0.5 for column in zip(*norms, strict=True))
    if apart > WORST_REFERENCE * whole:
        raise ValueError(f"eager is off from float64 by {apart / whole:.1e}: no program to compare")


def _time(steps: Steps, opened: Opened, repeats: int, verdict: Verdict) -> None:
    """Steps in turn, in eager and compiled: a slow spell of the machine meets both."""
    steps.reset()
    ours: list[StepTime] = []
    theirs: list[StepTime] = []

    def compiled_step() -> None:
        ours.append(steps.time(opened.call))

    with no_garbage_collection():
        for _ in range(repeats + 2):
            opened.around(compiled_step)
            theirs.append(steps.time(steps.sample.model))
    step, eager = (statistics.median(map(sum, times[2:])) for times in (ours, theirs))
    verdict.step_ms, verdict.eager_ms = round(1e3 * step, 3), round(1e3 * eager, 3)
    verdict.ratio = round(step / eager, 3)
    backward, eager_backward = (statistics.median(time.backward for time in times[2:]) for times in (ours, theirs))
    verdict.backward_ratio = round(backward / eager_backward, 3)


def _weigh(steps: Steps, opened: Opened, verdict: Verdict) -> None:
    """The peaks of a step. torch's profiler does not see the memory of IREE's programs on a CPU, which is shown to it;
    on a GPU they take torch's."""
    # Gradients that are there before would be let go of while it counts.
    steps.sample.model.zero_grad()
    verdict.eager_peak_bytes = held_at_most(lambda: steps.time(steps.sample.model))
    steps.sample.model.zero_grad()
    if verdict.door == "inductor" or torch.cuda.is_initialized():
        verdict.peak_bytes = held_at_most(lambda: steps.time(opened.call))
    else:
        verdict.peak_bytes = opened.peak()


def _describe(error: BaseException) -> tuple[str, str]:
    """Whether an error is a refusal, and its first line. Dynamo wraps what its backend raises."""
    inner = getattr(error, "inner_exception", None) or error
    seen: BaseException | None = inner
    while seen is not None and not isinstance(seen, REFUSALS):
        seen = seen.__cause__
    named = seen or inner
    lines = [line.strip() for line in str(named).splitlines() if line.strip()]
    text = f"{type(named).__name__}: {lines[0] if lines else 'no message'}"
    if seen is not None:
        return "refused", text
    last = traceback.extract_tb(inner.__traceback__)[-1]
    return "crashed", f"{text} (in {last.name}, {last.filename.rpartition('site-packages/')[2]}:{last.lineno})"
