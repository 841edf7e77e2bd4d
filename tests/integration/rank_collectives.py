# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Two processes whose programs have collectives as ops: `main` is what each of them runs.

For each program it prints in which order starts, computation and waits came in the last backward, once all gradients
are eager's, and what was said of it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rank_programs import COMPILED, compare, describe, device, joined, make_model, ran
from rank_runner import RANKS
from torch import Tensor, nn

import retrograd
from retrograd.runtime.steps import collectives
from retrograd.runtime.steps.bound_function import BoundFunction

STEPS = 4
# A layer's weight takes 144 bytes, and its bias 24.
BUCKETS = retrograd.Collectives(bucket_bytes=200, first_bucket_bytes=100)


# What a process did, a word each: start, compute, wait.
log: list[str] = []


def everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def keep_log() -> None:
    """Have `log` filled from here on."""
    module: Any = collectives
    make_start, wait, call = module.make_start, module.wait, BoundFunction.__call__

    def make_logged_start(what: Any) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        start = make_start(what)

        def logged_start(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            log.append(f"{what.collective}({len(tensors)})")
            started: Sequence[Tensor] = start(tensors)
            return started

        return logged_start

    def logged_wait(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        log.append("wait")
        result: Sequence[Tensor] = wait(tensors)
        return result

    def logged_call(self: BoundFunction, *arguments: Any) -> Any:
        log.append("compute")
        return call(self, *arguments)

    module.make_start, module.wait = make_logged_start, logged_wait
    function: Any = BoundFunction
    function.__call__ = logged_call


def show_log() -> str:
    """The log, with runs of the same counted."""
    runs = [(word, len(list(run))) for word, run in itertools.groupby(log)]
    return " ".join(f"{word} x{count}" if count > 1 else word for word, count in runs)


# -- Gradients that hooks average -------------------------------------------------------------------------------------


def average(gradient: Tensor) -> Tensor:
    """A hook of the user's, as a data-parallel training has it for each parameter."""
    result: Tensor = functional.all_reduce(gradient, "avg", everyone())
    return result


def averaged(model: nn.Module, hook: Callable[[Tensor], Tensor]) -> nn.Module:
    for parameter in model.parameters():
        parameter.register_hook(hook)
    return model


def averaged_twins(hook: Callable[[Tensor], Tensor] = average) -> tuple[nn.Module, nn.Module]:
    """Two models of the same parameters, whose gradients are averaged: to run in eager, and with ``hook`` inlined."""
    torch.manual_seed(0)
    plain = make_model().to(device())
    return averaged(copy.deepcopy(plain), average), averaged(plain, retrograd.inlineable(hook))


def train_averaged(hook: Callable[[Tensor], Tensor] = average, **options: Any) -> str:
    """Train beside eager; says how it ran, in which order, and what was joined."""
    eager, ours = averaged_twins(hook)
    before = len(retrograd.explain_recompiles())
    for step in range(STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(5, 4).to(device())
        for model, scope in ((eager, contextlib.nullcontext()), (ours, retrograd.enable(**options))):
            ran.clear()
            log.clear()
            model.zero_grad()
            with scope:
                model(x).square().mean().backward()
        compare(eager, ours, 2e-5)
    reasons = [r for e in retrograd.explain_recompiles()[before:] for r in e.reasons if "joined" in r]
    return f"{describe(before)}: {show_log()}{''.join(f'; {reason}' for reason in reasons)}"


def average_twice(gradient: Tensor) -> Tensor:
    """The second depends on what the first gives."""
    once = functional.all_reduce(gradient, "avg", everyone())
    result: Tensor = functional.all_reduce(once * 1.0, "avg", everyone())
    return result


def one_rank_refuses() -> str:
    """The first process trains in eager, the other compiled: starts are those of eager, in its order."""
    eager, ours = averaged_twins()
    scope = retrograd.enable(hook_schedule="overlap") if dist.get_rank() else contextlib.nullcontext()
    for step in range(STEPS):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(5, 4).to(device())
        for model, around in ((eager, contextlib.nullcontext()), (ours, scope)):
            ran.clear()
            model.zero_grad()
            with around:
                model(x).square().mean().backward()
        compare(eager, ours, 2e-5)
    return COMPILED if ran or not dist.get_rank() else "nothing ran compiled"


# -- Weights of which each process has a part -------------------------------------------------------------------------


class Sharded(torch.autograd.Function):
    """A layer of whose weight each process has some rows: it is gathered for the forward, once more for the backward,
    and its gradient goes to those who have the rows."""

    @staticmethod
    def forward(x: Tensor, shard: Tensor) -> Tensor:
        return x @ gather(shard).T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, shard = ctx.saved_tensors
        weight = gather(shard)
        mine = functional.reduce_scatter_tensor(gradient.T @ x, "avg", 0, everyone())
        return gradient @ weight, mine


def gather(shard: Tensor) -> Tensor:
    result: Tensor = functional.all_gather_tensor(shard, 0, everyone())
    return result


class ShardedLayers(nn.Module):
    def __init__(self, layers: int = 3, width: int = 6) -> None:
        super().__init__()
        self.shards = nn.ParameterList([nn.Parameter(torch.randn(width // RANKS, width)) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = Sharded.apply
        for shard in self.shards:
            x = torch.tanh(layer(x, shard))
        return x


def train_sharded(collectives: retrograd.Collectives | None, *, dynamo: bool = False) -> str:
    torch.manual_seed(dist.get_rank())
    eager = ShardedLayers().to(device())
    ours = copy.deepcopy(eager)
    x = torch.randn(5, 6).to(device())
    options: Any = {} if collectives is None else {"collectives": collectives}
    call: Any = (
        torch.compile(ours, backend="retrograd", options=options)
        if dynamo
        else retrograd.compile_backward(ours, (x,), collectives=collectives)
    )
    for _ in range(STEPS):
        x = torch.randn(5, 6).to(device())
        for model, run in ((eager, eager), (ours, call)):
            model.zero_grad()
            loss = run(x).square().mean()
            log.clear()
            loss.backward()
        compare(eager, ours, 2e-5)
    said = []
    if not dynamo:
        said = call.explain().to_dict()["collectives"]
        with contextlib.suppress(retrograd.ArtifactError):
            call.save(os.devnull)
            said.append("a file of one process cannot run it, and was written")
    return f"{show_log()}; {'; '.join(said)}"


PROGRAMS: Mapping[str, Callable[[], str]] = {
    "hooks": train_averaged,
    "hooks, overlap": lambda: train_averaged(hook_schedule="overlap"),
    "hooks, buckets": lambda: train_averaged(hook_schedule="overlap", collectives=BUCKETS),
    "hooks, one depends on the other": lambda: train_averaged(average_twice, collectives=retrograd.Collectives()),
    "hooks, one rank": one_rank_refuses,
    "sharded": lambda: train_sharded(None),
    "sharded, prefetched": lambda: train_sharded(retrograd.Collectives(bucket_bytes=0)),
    "sharded, no memory": lambda: train_sharded(retrograd.Collectives(bucket_bytes=0, prefetch_bytes=100)),
    "sharded, dynamo": lambda: train_sharded(retrograd.Collectives(bucket_bytes=0), dynamo=True),
}


def main(kind: str, store: str, rank: str) -> None:
    """Be process ``rank`` of those that meet at ``store``, on ``kind``, "cpu" or "cuda"."""
    with joined(kind, store, int(rank)):
        keep_log()
        for name, program in PROGRAMS.items():
            torch._C._dynamo.compiled_autograd.clear_cache()
            torch._dynamo.reset()
            print(f"{name}: {program()}", flush=True)
    sys.stdout.flush()
    os._exit(0)
