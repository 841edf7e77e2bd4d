# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The doors through which a program is compiled: retrograd's three, and Inductor beside them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from corpus_case import Sample
from corpus_steps import Steps
from measure import left_to_eager

import retrograd

DOORS = ("compile_backward", "torch.compile", "enable", "inductor")
REFUSALS = (retrograd.CaptureError, retrograd.PipelineError, retrograd.CompileError)


class NotCompiledError(Exception):
    """What was to be compiled runs in eager; the message says why."""


@dataclass
class Opened:
    """A program that was compiled: what is called in place of the model, and what runs the step.

    ``seconds`` is the time from the beginning to the end of the first step, less that of a step. ``notes`` say what
    of it runs in eager between compiled parts, and ``peak_bytes`` the most memory that a step has been seen to take; None
    where torch's profiler can tell.
    """

    call: Callable[..., Any]
    seconds: float
    around: Callable[[Callable[[], None]], None] = lambda step: step()
    notes: Callable[[], list[str]] = list
    peak_bytes: Callable[[], int | None] = lambda: None
    islands: list[str] = field(default_factory=list)


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


def _compile_backward(sample: Sample, steps: Steps) -> Opened:
    steps.reset()
    start = time.perf_counter()
    step = retrograd.compile_backward(sample.model, (), sample.inputs(0), cache=False)
    steps.run(step, 0)
    seconds = time.perf_counter() - start

    def peak() -> int | None:
        measured: int | None = step.explain().to_dict()["peak_bytes_measured"]
        return measured

    return Opened(step, seconds, peak_bytes=peak)


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
    start = time.perf_counter()
    steps.run(call, 0)
    seconds = time.perf_counter() - start
    if not counters["stats"]["unique_graphs"]:
        raise NotCompiledError(left_to_eager(counters) or "no graph was captured")

    def notes() -> list[str]:
        breaks = [reason.splitlines()[0] for reason in counters["graph_break"]]
        count = counters["stats"]["unique_graphs"]
        return [f"{count} graphs: {'; '.join(breaks) or 'sizes or numbers that differ'}"] if count > 1 else []

    return Opened(call, seconds, notes=notes)


def _enable(sample: Sample, steps: Steps) -> Opened:
    def around(step: Callable[[], None]) -> None:
        with retrograd.enable(cache=False):
            step()

    before = len(retrograd.explain_recompiles())
    steps.reset()
    start = time.perf_counter()
    steps.run(sample.model, 0, around)
    seconds = time.perf_counter() - start
    steps.run(sample.model, 0, around)
    found = retrograd.explain_recompiles()[before:]
    if not any(entry.outcome.startswith("compiled") for entry in found):
        raise NotCompiledError(
            "; ".join(reason for entry in found for reason in entry.reasons) or "nothing was captured"
        )

    def notes() -> list[str]:
        entries = retrograd.explain_recompiles()[before + 1 :]
        return [f"{entry.outcome}: {'; '.join(entry.reasons)}" for entry in entries]

    return Opened(sample.model, seconds, around, notes)


_OPENERS: dict[str, Callable[[Sample, Steps], Opened]] = {
    "compile_backward": _compile_backward,
    "torch.compile": _torch_compile,
    "enable": _enable,
    "inductor": _inductor,
}
