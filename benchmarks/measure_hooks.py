# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The cases of benchmarks/hooks.py: each measures one engine and returns its figures by name."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from engine_clocks import ROUNDS, STEPS, count_calls, medians
from torch import nn
from torch._dynamo import compiled_autograd
from torch.autograd.graph import saved_tensors_hooks

import retrograd
from retrograd.build import _EXECUTORS

ENGINES = ("eager", "compiled autograd, aot_eager", "compiled autograd, inductor", "retrograd")
Figures = dict[str, Any]
_MIB = 1 << 20


def scope(engine: str) -> AbstractContextManager[Any]:
    """The context in which an engine runs backwards."""
    if engine == "eager":
        return contextlib.nullcontext()
    if engine == "retrograd":
        return retrograd.enable(cache=False)
    return compiled_autograd._enable(torch.compile(backend=engine.partition(", ")[2]))


def overhead(engine: str) -> Figures:
    """A step of eight elements, forward and backward, with no hooks and with eight, in us of CPU time."""
    w = torch.randn(8, requires_grad=True)

    def step() -> None:
        w.grad = None
        (w.sin() * w).sum().backward()

    with scope(engine):
        bare = _microseconds(step)
        for _ in range(8):
            w.register_hook(lambda gradient: None)
        hooked = _microseconds(step)
    return {
        "step, us": round(bare, 1),
        "with 8 hooks, us": round(hooked, 1),
        "a hook, us": round((hooked - bare) / 8, 1),
    }


def share(engine: str) -> Figures:
    """Where the time of that step's backward goes, and of a chain whose eight hooks cut it into nine stages, in us;
    the medians of 300 steps, in the fastest of several rounds. *PyTorch* is its C++ engine with compiled autograd's
    lookup of what was captured, *IREE* the calls of its runtime: the functions themselves, and importing torch's
    storage as buffers. *ours* is all the rest between the call of the engine and its return: the engine that stands
    before PyTorch's, the guards, the plan, its Python calls, torch tensors for results, accumulation. *a stage more* is
    with the hook that begins it. What the clocks take themselves, by their cost on a function that does nothing, is
    left out."""
    w = torch.randn(8, requires_grad=True)

    def chain(hooks: int) -> Callable[[], None]:
        def step() -> None:
            w.grad = None
            y = w.sin()
            for _ in range(hooks):
                y.register_hook(_no_hook)
                y = y.sin()
            (y * w).sum().backward()

        return step

    counters = count_calls()
    rows = {}
    with scope(engine):
        for hooks in (0, 8):
            rows[hooks] = medians(chain(hooks), counters)
    bare, cut = rows[0], rows[8]
    return {
        "backward": bare["backward"],
        "PyTorch": bare["PyTorch"],
        "IREE": bare["IREE"],
        "ours": bare["ours"],
        "with nine stages: backward": cut["backward"],
        "ours with nine": cut["ours"],
        "a stage more, ours": round((cut["ours"] - bare["ours"]) / 8, 1),
        "a stage more, IREE": round((cut["IREE"] - bare["IREE"]) / 8, 1),
    }


def _no_hook(gradient: torch.Tensor) -> None:
    """A hook that changes nothing."""


def stages(engine: str) -> Figures:
    """Compiled functions in one backward of an MLP of four layers with a hook on every parameter, by schedule."""
    found: Figures = {}
    for schedule in ("eager-order", "asap", "overlap", "fewest-stages"):
        model = _mlp(16, 4)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: None)
        x = torch.randn(8, 16)
        with retrograd.enable(hook_schedule=schedule, cache=False):
            for _ in range(2):
                model.zero_grad()
                model(x).square().mean().backward()
        executor = next(e for key, e in _EXECUTORS.items() if key[0].hook_schedule == schedule)
        found[schedule] = len(executor._functions)
    return found


def compilations(engine: str) -> Figures:
    """Captures and compilations over 40 steps that mix gradient accumulation, both ways of zero_grad, retain_graph, a
    frozen layer and two sizes of the batch."""
    model = _mlp(16, 2)
    before = len(retrograd.explain_recompiles())
    for step in range(40):
        if step % 3 == 0:
            model.zero_grad(set_to_none=step % 2 == 0)
        model[0].requires_grad_(step < 20)
        loss = model(torch.randn(8 if step % 5 else 4, 16)).square().mean()
        with scope(engine):
            loss.backward(retain_graph=step % 4 == 0)
    outcomes = [entry.outcome for entry in retrograd.explain_recompiles()[before:]]
    return {
        "captures": len(outcomes),
        "compiled": outcomes.count("compiled"),
        "run eagerly": outcomes.count("runs eagerly"),
    }


def packed(engine: str) -> Figures:
    """Saved tensors packed by hooks, to bf16 or to float8 with one scale each; an MLP of eight layers of width 1024,
    batch 2048. Peak of a step, MiB."""
    return {
        "bf16, peak, MiB": _packed_peak(engine, torch.Tensor.bfloat16, torch.Tensor.float),
        "float8, peak, MiB": _packed_peak(engine, _to_float8, _from_float8),
    }


def _to_float8(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = tensor.abs().amax() / torch.finfo(torch.float8_e4m3fn).max
    return (tensor / scale).to(torch.float8_e4m3fn), scale


def _from_float8(packed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return packed[0].float() * packed[1]


def _packed_peak(engine: str, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> float:
    model, x = _mlp(1024, 8), torch.randn(2048, 1024)
    kept = {p.data_ptr() for p in model.parameters()}

    def pack_some(tensor: torch.Tensor) -> Any:
        return (tensor,) if tensor.untyped_storage().data_ptr() in kept else (pack(tensor), None)

    def unpack_some(packed: Any) -> torch.Tensor:
        return packed[0] if len(packed) == 1 else unpack(packed[0])

    def step() -> None:
        model.zero_grad()
        with saved_tensors_hooks(pack_some, retrograd.inlineable(unpack_some)):
            loss = model(x).square().mean()
        with scope(engine):
            loss.backward()

    return _peak(step)


def optimizer(engine: str) -> Figures:
    """AdamW in post-accumulate hooks, the gradient freed at once; the same MLP, batch 256. Peak of a step, MiB."""
    model, x = _mlp(1024, 8), torch.randn(256, 1024)
    optimizers = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

    @retrograd.inlineable
    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)

    def step() -> None:
        loss = model(x).square().mean()
        with scope(engine):
            loss.backward()

    return {"peak, MiB": _peak(step)}


def growth(engine: str) -> Figures:
    """Memory after 10,000 steps with hooks, beyond that after 1,000: objects that Python tracks, and resident KiB."""
    w = torch.randn(8, requires_grad=True)
    w.register_hook(lambda gradient: gradient * 2)
    w.register_post_accumulate_grad_hook(lambda parameter: None)

    def run(steps: int) -> tuple[int, int]:
        for _ in range(steps):
            w.grad = None
            (w.sin() * w).sum().backward()
        gc.collect()
        return len(gc.get_objects()), _status("VmRSS")

    with scope(engine):
        objects, resident = run(1000)
        later, grown = run(10000)
    return {"objects": later - objects, "resident, KiB": (grown - resident) // 1024}


# What cannot be said of other engines.
for _only in (share, stages, compilations, growth):
    _only.compares = False  # type: ignore[attr-defined]
CASES: dict[str, Callable[[str], Figures]] = {
    case.__name__: case for case in (overhead, share, stages, compilations, packed, optimizer, growth)
}


def _mlp(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())])


def _microseconds(step: Callable[[], None]) -> float:
    for _ in range(20):
        step()
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.thread_time_ns()
        for _ in range(STEPS):
            step()
        best = min(best, (time.thread_time_ns() - start) / STEPS / 1e3)
    return best


def _peak(step: Callable[[], None]) -> float:
    """The most that the resident memory rises in a step, once all is compiled."""
    for _ in range(4):
        step()
    risen = []
    for _ in range(3):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _status("VmRSS")
        step()
        risen.append(_status("VmHWM") - before)
    return round(min(risen) / _MIB, 1)


def _status(field: str) -> int:
    """A size that the kernel keeps of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
