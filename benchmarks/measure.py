# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Measures one model of the suite through eager PyTorch, `torch.compile` and retrograd, in one process and in turn."""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from models import Case
from torch import Tensor
from torch.utils import _pytree as pytree

import retrograd

WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Row:
    """One model through one engine. Times in milliseconds are medians; None is what could not be had.

    ``ratio`` is the backward's time to eager's. ``gradient_error`` is the largest difference from eager's gradients,
    relative to the largest element of each. ``note`` says why figures are missing, or what to know about them.
    """

    model: str
    engine: str
    forward_ms: float | None = None
    backward_ms: float | None = None
    backward_best_ms: float | None = None
    ratio: float | None = None
    compile_seconds: float | None = None
    saved_bytes: int | None = None
    peak_bytes_predicted: int | None = None
    peak_bytes_measured: int | None = None
    gradient_error: float | None = None
    note: str = ""


Scope = Callable[[], AbstractContextManager[Any]]


@dataclass
class Contender:
    """A compiled model, with what its engine says of it and the times of its steps, in seconds; ``scope`` is what its
    backwards run in."""

    engine: str
    call: Callable[..., Any]
    compile_seconds: float | None = None
    report: Callable[[], Mapping[str, Any]] = dict
    note: str = ""
    scope: Scope = contextlib.nullcontext
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)


def eager(case: Case) -> Contender:
    """The model as it is."""
    return Contender("eager", case.model)


def inductor(case: Case) -> Contender:
    """`torch.compile` with its own backend; compile time is that of the first step, in which it compiles.

    Raises:
        RuntimeError: it cannot compile, for want of a C++ compiler for one.
    """
    _start_inductor()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call = torch.compile(case.model)
    # A cache that an earlier run filled would make compile times meaningless.
    with warnings.catch_warnings(), torch._inductor.config.patch(force_disable_caches=True):
        # Of its own disabled caches, and of its own deprecated functions.
        warnings.filterwarnings("ignore", module=r"torch\._(dynamo|inductor)\.")
        seconds = sum(run_step(case, call))
    return Contender("inductor", call, seconds, note=left_to_eager(torch._dynamo.utils.counters))


def left_to_eager(counters: Mapping[str, Mapping[str, int]]) -> str:
    """Why Dynamo left something to eager, from its own counts; empty if it did not."""
    reasons = [*counters["graph_break"], *counters["unimplemented"]]
    frames = counters["frames"]
    if not reasons and frames.get("ok") == frames.get("total"):
        return ""
    return f"in part or whole eager: {reasons[0].splitlines()[0] if reasons else 'frames skipped'}"


@functools.cache
def _start_inductor() -> None:
    """Pay once for what Inductor does once per process and machine: probing the CPU, precompiling headers."""
    x = torch.ones(64, requires_grad=True)
    torch.compile(lambda x: x.sin().exp())(x).sum().backward()


def retrograd_cpu(case: Case) -> Contender:
    """Compiled by retrograd with its default options.

    Raises:
        RuntimeError: it cannot be captured or compiled.
    """
    start = time.perf_counter()
    step = retrograd.compile_backward(case.model, case.args, cache=False)
    return Contender("retrograd", step, time.perf_counter() - start, lambda: step.explain().to_dict())


def retrograd_enable(case: Case) -> Contender:
    """The model as it is, its backward captured as it runs; compile time is that of the first step, which records,
    compiles and rehearses it."""
    before = len(retrograd.explain_recompiles())

    def scope() -> AbstractContextManager[Any]:
        return retrograd.enable(cache=False)

    seconds = sum(run_step(case, case.model, scope))
    told = [str(e) for e in retrograd.explain_recompiles()[before:] if "runs" in str(e)]
    return Contender("enable()", case.model, seconds, note=" ".join(told), scope=scope)


ENGINES: dict[str, Callable[[Case], Contender]] = {
    "eager": eager,
    "inductor": inductor,
    "retrograd": retrograd_cpu,
    "enable()": retrograd_enable,
}


def measure(name: str, case: Case, repeats: int, say: Callable[[str], None]) -> list[Row]:
    """Compile ``case`` with every engine, then time ``repeats`` steps of each, in turn; one row per engine."""
    contenders: list[Contender] = []
    failures: dict[str, str] = {}
    for engine, prepare in ENGINES.items():
        say(f"{name}: {engine}" if engine == "eager" else f"{name}: compiling with {engine}")
        try:
            contender = prepare(case)
            for _ in range(WARM_UP_STEPS):
                run_step(case, contender.call, contender.scope)
        except RuntimeError as error:
            failures[engine] = first_line(error)
        else:
            contenders.append(contender)
    reference = gradients(case, case.model)
    facts = {c.engine: (count_saved_bytes(case, c.call), _difference(case, c, reference)) for c in contenders}
    say(f"{name}: timing {repeats} steps of each")
    time_in_turn(case, contenders, repeats)
    baseline = statistics.median(contenders[0].backward)
    rows = [_row(name, c, baseline, *facts[c.engine]) for c in contenders]
    return rows + [Row(name, engine, note=f"failed: {message}") for engine, message in failures.items()]


def time_in_turn(case: Case, contenders: Sequence[Contender], repeats: int) -> None:
    """Time steps of all contenders, each round beginning with another: a slow spell of the machine meets all."""
    with no_garbage_collection():
        for turn in range(repeats):
            first = turn % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                forward, backward = run_step(case, contender.call, contender.scope)
                contender.forward.append(forward)
                contender.backward.append(backward)


def run_step(case: Case, call: Callable[..., Any], scope: Scope = contextlib.nullcontext) -> tuple[float, float]:
    """A step from scratch: seconds in the forward (with the loss) and in the backward."""
    for leaf in case.leaves().values():
        leaf.grad = None
    start = time.perf_counter()
    loss = case.loss(call(*case.args))
    middle = time.perf_counter()
    with scope():
        loss.backward()
    return middle - start, time.perf_counter() - middle


def gradients(case: Case, call: Callable[..., Any], scope: Scope = contextlib.nullcontext) -> dict[str, Tensor]:
    """The gradients of one step, by name."""
    run_step(case, call, scope)
    return {name: leaf.grad for name, leaf in case.leaves().items() if leaf.grad is not None}


def count_saved_bytes(case: Case, call: Callable[..., Any]) -> int:
    """Bytes that the model's forward keeps for its backward: each storage once, and none of parameters or arguments."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = call(*case.args)
    state = case.model.state_dict().values() if isinstance(case.model, torch.nn.Module) else ()
    given = _storages([*state, *pytree.tree_leaves(case.args)])
    saved = {address: size for address, size in _storages(kept).items() if address not in given}
    # The storages must not be freed, and their addresses taken by others, before they are counted.
    del outputs
    return sum(saved.values())


def _storages(values: Iterable[Any]) -> dict[int, int]:
    storages = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _difference(case: Case, contender: Contender, reference: Mapping[str, Tensor]) -> float:
    found = gradients(case, contender.call, contender.scope)
    if found.keys() != reference.keys():
        raise AssertionError(f"gradients for {sorted(found)}, expected {sorted(reference)}")
    return max(
        float((found[name] - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny))
        for name, expected in reference.items()
    )


def _row(name: str, contender: Contender, baseline: float, saved_bytes: int, gradient_error: float) -> Row:
    report = contender.report()
    backward = statistics.median(contender.backward)
    return Row(
        model=name,
        engine=contender.engine,
        forward_ms=1e3 * statistics.median(contender.forward),
        backward_ms=1e3 * backward,
        backward_best_ms=1e3 * min(contender.backward),
        ratio=backward / baseline,
        compile_seconds=contender.compile_seconds,
        saved_bytes=saved_bytes,
        peak_bytes_predicted=report.get("peak_bytes_predicted"),
        peak_bytes_measured=report.get("peak_bytes_measured"),
        gradient_error=gradient_error,
        note=contender.note,
    )


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
