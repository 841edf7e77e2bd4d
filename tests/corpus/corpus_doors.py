# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The doors through which a program is compiled: retrograd's three, and Inductor beside them."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from corpus_case import Sample
from corpus_steps import Steps
from measure import left_to_eager
from measure_memory import held_beside_scratch

import retrograd

DOORS = ("compile_backward", "torch.compile", "enable", "inductor")
# No door: that a program nobody chose is one, and eager near enough to float64.
EAGER = "eager"
REFUSALS = (retrograd.CaptureError, retrograd.PipelineError, retrograd.CompileError)


class NotCompiledError(Exception):
    """What was to be compiled runs in eager; the message says why."""


@dataclass
class Opened:
    """A program that was compiled: what is called in place of the model, and what runs the step.

    ``seconds`` is the time from the beginning to the end of the first step, and ``cpu_seconds`` what of the processors'
    time that took. ``notes`` say what of it runs in eager between compiled parts, and ``peak`` the most bytes that a
    step has been seen to take; None where torch's profiler can tell.
    """

    call: Callable[..., Any]
    seconds: float
    cpu_seconds: float
    around: Callable[[Callable[[], None]], None] = lambda step: step()
    notes: Callable[[], list[str]] = list
    peak: Callable[[], int | None] = lambda: None
    islands: list[str] = field(default_factory=list)


class Clock:
    """Counts seconds from when it is made: of time, and of the processors' time that this process and those that it
    started have taken."""

    def __init__(self) -> None:
        self._start, self._cpu = time.perf_counter(), _processor_seconds()

    def read(self) -> tuple[float, float]:
        """Seconds of time, and of processor time."""
        return time.perf_counter() - self._start, _processor_seconds() - self._cpu


def _processor_seconds() -> float:
    """Of this process and its descendants, those that have ended included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The name, which may have spaces in it, is in parentheses; what processes that ended took is told apart.
            fields = file.read_text(encoding="utf-8").rpartition(")")[2].split()
            number = int(file.parent.name)
            parents[number], ticks[number] = int(fields[1]), sum(map(int, fields[11:15]))
    total = 0
    for number in ticks:
        ancestor = number
        while ancestor not in (0, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        total += ticks[number] if ancestor else 0
    return total / os.sysconf("SC_CLK_TCK")


def open_door(door: str, sample: Sample, steps: Steps) -> Opened:
    """Compile a program, and run its first step.

    Raises:
        CaptureError, PipelineError, CompileError, NotCompiledError: it is refused.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opened = _OPENERS[door](sample, steps)
    opened.islands = [
        line.strip()
        for warning in caught
        if issubclass(warning.category, retrograd.EagerIslandWarning)
        for line in str(warning.message).splitlines()
    ]
    return opened


def _eager(sample: Sample, steps: Steps) -> Opened:
    steps.run(sample.model, 0)
    return Opened(sample.model, 0.0, 0.0)


def _compile_backward(sample: Sample, steps: Steps) -> Opened:
    steps.reset()
    clock = Clock()
    step = retrograd.compile_backward(sample.model, (), sample.inputs(0), cache=False)
    steps.run(step, 0)
    taken = clock.read()

    def peak() -> int | None:
        # With open sizes it is not known what each function works in.
        known = "timeline" in step.explain().to_dict()
        return held_beside_scratch(step, lambda: steps.time(step)) if known else None

    return Opened(step, *taken, peak=peak)


def _torch_compile(sample: Sample, steps: Steps) -> Opened:
    return _with_dynamo(sample, steps, backend="retrograd", options={"cache": False})


def _inductor(sample: Sample, steps: Steps) -> Opened:
    import torch._inductor.config

    # What it pays once for a process and a machine: probing the CPU, precompiling headers.
    x = torch.ones(64, requires_grad=True)
    torch.compile(lambda x: x.sin().exp())(x).sum().backward()
    with torch._inductor.config.patch(force_disable_caches=True):
        return _with_dynamo(sample, steps)


def _with_dynamo(sample: Sample, steps: Steps, **how: Any) -> Opened:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    call = torch.compile(sample.model, **how)
    steps.reset()
    clock = Clock()
    steps.run(call, 0)
    taken = clock.read()
    if not counters["stats"]["unique_graphs"]:
        raise NotCompiledError(left_to_eager(counters) or "no graph was captured")

    def notes() -> list[str]:
        breaks = [reason.splitlines()[0] for reason in counters["graph_break"]]
        count = counters["stats"]["unique_graphs"]
        return [f"{count} graphs: {'; '.join(breaks) or 'sizes or numbers that differ'}"] if count > 1 else []

    return Opened(call, *taken, notes=notes)


def _enable(sample: Sample, steps: Steps) -> Opened:
    def around(step: Callable[[], None]) -> None:
        with retrograd.enable(cache=False):
            step()

    before = len(retrograd.explain_recompiles())
    steps.reset()
    clock = Clock()
    steps.run(sample.model, 0, around)
    taken = clock.read()
    steps.run(sample.model, 0, around)
    found = retrograd.explain_recompiles()[before:]
    if not any(entry.outcome.startswith("compiled") for entry in found):
        raise NotCompiledError(
            "; ".join(reason for entry in found for reason in entry.reasons) or "nothing was captured"
        )

    def notes() -> list[str]:
        entries = retrograd.explain_recompiles()[before + 1 :]
        return [f"{entry.outcome}: {'; '.join(entry.reasons)}" for entry in entries]

    return Opened(sample.model, *taken, around, notes)


_OPENERS: dict[str, Callable[[Sample, Steps], Opened]] = {
    "compile_backward": _compile_backward,
    "torch.compile": _torch_compile,
    "enable": _enable,
    "inductor": _inductor,
    EAGER: _eager,
}
