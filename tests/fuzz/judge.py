# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One program, compiled, beside eager; and the smallest program that goes wrong as it does."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from programs import Program, with_outputs, without_statement
from rounding import Rounded
from torch import Tensor

import retrograd
from retrograd.frontend.verification.distances import error_of
from retrograd.frontend.verification.judgement import SHAKES, SLACK

# Relative error that rounding explains, by dtype, whatever eager's own is: less than what a first call is allowed,
# whose graphs are those of whole models.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2}
# Outputs below this are zero but for rounding: arguments are of the order of 1.
FLOOR = 1e-3
CANCELLED = 1e-2
REFUSALS = (retrograd.CaptureError, retrograd.PipelineError, retrograd.CompileError)


@dataclass(frozen=True)
class Verdict:
    """``kind`` is ``right``, ``wrong``, ``refused``, ``failed`` (an error that is no refusal) or ``no program``, which
    is one that eager refuses or that is not finite."""

    kind: str
    reason: str = ""


@dataclass(frozen=True)
class Run:
    """What a run gave, by name: outputs, arguments afterwards, gradients (``None`` where there is none)."""

    values: dict[str, Tensor | None]


def judge(program: Program, device: str = "cpu") -> Verdict:
    """Compile a program for a device and compare outputs, arguments and gradients with eager's there, measured against
    f64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _judge(program, device)


def _judge(program: Program, device: str) -> Verdict:
    arguments = partial(program.arguments, device=device)
    try:
        eager = run(program, program.function(), arguments())
        precise = run(program, program.function(precise=True), arguments(precise=True))
    except Exception as error:  # noqa: BLE001  (whatever eager refuses is no program)
        return Verdict("no program", type(error).__name__)
    if not all(v is None or bool(v.isfinite().all()) for v in (*eager.values.values(), *precise.values.values())):
        return Verdict("no program", "not finite")
    try:
        step = retrograd.compile_backward(
            program.function(),
            arguments(),
            partition=program.partition,  # type: ignore[arg-type]
            cache=False,
        )
    except REFUSALS as error:
        return Verdict("refused", reason_of(error, program))
    except Exception as error:  # noqa: BLE001  (what it is goes into the report)
        return Verdict("failed", reason_of(error, program))
    try:
        compiled = run(program, step, arguments())
    except retrograd.ArgumentError as error:
        # How an argument lies in memory is looked at when it is given.
        kind = "refused" if "is expanded" in str(error) else "failed"
        return Verdict(kind, reason_of(error, program))
    except Exception as error:  # noqa: BLE001  (what it is goes into the report)
        return Verdict("failed", reason_of(error, program))
    problems = compare(compiled, eager, precise)
    if problems:
        # The largest of numbers that cancel, say, is another each time: rounding alone says which.
        shaken = [shake(program, times, device) for times in range(1, SHAKES + 1)]
        problems = compare(compiled, eager, precise, shaken)
    return Verdict("wrong", "; ".join(problems)) if problems else Verdict("right")


def run(program: Program, function: Callable[..., Any], arguments: Sequence[Tensor]) -> Run:
    """Run forward and backward, of a sum of the outputs that is weighted with random numbers. Values are on the CPU."""
    generator = torch.Generator().manual_seed(program.seed + 1)
    leaves = {i.name: a for i, a in zip(program.inputs, arguments, strict=True) if a.requires_grad}
    outputs = function(*arguments)
    values: dict[str, Tensor | None] = {f"output {n}": o.detach() for n, o in enumerate(outputs)}
    values |= {f"argument {i.name}": a.detach() for i, a in zip(program.inputs, arguments, strict=True)}
    loss = torch.zeros((), dtype=torch.float64)
    for output, used in zip(outputs, program.differentiated, strict=True):
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        if used and output.requires_grad:
            loss = loss + (output.double() * weights.to(output.device)).sum().cpu()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    values |= {f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True)}
    return Run({name: None if value is None else value.cpu() for name, value in values.items()})


def shake(program: Program, times: int, device: str = "cpu") -> Run:
    """Run eager with arguments, and what each op computes, off by what rounding may be.

    Arguments alone do not tell: the rows of an expanded one are off by the same. Nor does eager alone, whose terms may
    happen to cancel.
    """
    function, arguments = program.function(), program.shaken(times, device)
    with Rounded(program.seed + times):
        return run(program, function, arguments)


def compare(compiled: Run, eager: Run, precise: Run, shaken: Sequence[Run] = ()) -> list[str]:
    """What is wrong with the compiled values; a missing gradient counts as zero. What ``shaken`` runs are off by counts
    as eager's own error.

    Errors are measured as those of a first call are. But all that is wrong is named, not the first result alone, and
    float64 is asked even where compiled code and eager agree.
    """
    problems = []
    gradients = [v for n, v in precise.values.items() if n.startswith("gradient") and v is not None]
    # A gradient that is zero but for rounding is measured against the others; where all are, against the terms that
    # cancel, which are of the order of 1 as arguments and weights are.
    floor = max(CANCELLED, FLOOR * max((float(g.norm()) for g in gradients), default=0.0))
    for name, reference in precise.values.items():
        ours, theirs = compiled.values[name], eager.values[name]
        if theirs is None or reference is None or ours is None:
            if any(v is not None and bool(v.any()) for v in (ours, theirs, reference)):
                problems.append(f"{name}: None and not zero")
            continue
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype or ours.stride() != theirs.stride():
            both = [f"{t.dtype} {tuple(t.shape)} stride {t.stride()}" for t in (ours, theirs)]
            if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
                problems.append(f"{name}: {both[0]}, eager {both[1]}")
                continue
        least = floor if name.startswith("gradient") else FLOOR
        others = [value for run in shaken if (value := run.values[name]) is not None]
        error, *own_errors = (error_of(t, reference, least) for t in (ours, theirs, *others))
        own = max(own_errors)
        if not error <= max(TOLERANCES.get(theirs.dtype, 0.0), SLACK * own):
            problems.append(f"{name}: off by {error:.1e}, eager by {own:.1e}")
    return problems


def reason_of(error: Exception, program: Program) -> str:
    """The first line of an error, short of what differs from program to program: numbers, names of files and values.

    Where it names a place in the program, the ops of that statement follow.
    """
    message = str(getattr(error, "message", None) or error)
    line = next((text for text in message.splitlines() if text.strip()), "")
    place = re.search(r"<fuzz>:(\d+)|<fuzz>\", line (\d+)", message)
    number = int(place[1] or place[2]) - 2 if place else -1
    statement = program.statements[number] if 0 <= number < len(program.statements) else ""
    ops = " ".join(dict.fromkeys(re.findall(r"(?:torch|F)?\.[a-z_]\w*(?=\()", statement))) or statement
    named = re.search(r'name = "(torch[\w.]*)"|(torch\.(?:aten|prims)\.[\w.]+)', line)
    text = (named[1] or named[2]) if named else re.sub(r"\d+|%\w+", "N", line.rpartition("error: ")[2])[:100]
    phase = f" {error.phase}" if isinstance(error, retrograd.CompileError) else ""
    return f"{type(error).__name__}{phase}: {text} | {ops}"


def shrink(program: Program, kind: str, judged: Callable[[Program], Verdict] = judge) -> Program:
    """A smaller program with a verdict of the same kind, by leaving out outputs and statements one at a time."""

    def goes_wrong(candidate: Program) -> bool:
        return judged(candidate).kind == kind

    for i in range(len(program.outputs)):
        if program.differentiated[i] and len(program.outputs) > 1:
            candidate = with_outputs(program, [i])
            if goes_wrong(candidate):
                program = candidate
                break
    for index in reversed(range(len(program.statements))):
        candidate = without_statement(program, index)
        if goes_wrong(candidate):
            program = candidate
    return program
