# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Models wrapped for two processes, each trained in eager and by retrograd side by side.

`main` is what each of the two processes runs that `rank_runner` starts. For each case of a group it prints how the
backwards of the model ran, once their gradients are eager's.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rank_runner import RANKS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import retrograd
from retrograd.api import dynamo_backend
from retrograd.frontend.autograd.steps import variants

COMPILED, EAGER = "compiled", "eager"
DTENSOR = f"{EAGER}: CaptureError: capture: a tensor of the backward is a DTensor"
NOT_FAKE = f"{EAGER}: PyTorch cannot capture it: Found tensor of type"
# In bfloat16 sums are added up in another order than eager's.
HALF = 2e-2

Scope = Callable[[], AbstractContextManager[Any]]
Wrap = Callable[[nn.Module], Any]
Step = Callable[[Any, Tensor, int], None]


class Block(nn.Module):
    def __init__(self, width: int, *, is_normed: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if is_normed else nn.Identity()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


def make_model(blocks: int = 2, *, is_normed: bool = True) -> nn.Sequential:
    """A norm is as many kernels again, which each process compiles for each program."""
    return nn.Sequential(nn.Linear(4, 6), *(Block(6, is_normed=is_normed) for _ in range(blocks)), nn.Linear(6, 2))


def device() -> torch.device:
    """This process's."""
    is_cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", dist.get_rank()) if is_cuda else torch.device("cpu")


def devices() -> Any:
    """The mesh of all processes."""
    return init_device_mesh(device().type, (RANKS,))


def ddp(model: nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(model, **options)


def fsdp1(model: nn.Module, **options: Any) -> Any:
    return FullyShardedDataParallel(model, device_id=device(), **options)


def fsdp1_of_blocks(model: Any) -> Any:
    """Each block gathered, and freed, by itself."""
    for number, block in enumerate(model):
        if isinstance(block, Block):
            model[number] = fsdp1(block)
    return fsdp1(model)


def fsdp2(model: Any, **options: Any) -> Any:
    mesh = devices()
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def tensor_parallel(model: nn.Module) -> Any:
    plan: dict[str, Any] = {}
    for number in (1, 2):
        plan |= {f"{number}.up": ColwiseParallel(), f"{number}.down": RowwiseParallel()}
    return parallelize_module(model, devices(), plan)


# Of each graph that Dynamo handed over since the case began, whether it was compiled.
parts: list[bool] = []


def counted(graph: torch.fx.GraphModule, *arguments: Any, **options: Any) -> Any:
    """The backend; Dynamo may ask for several parts of one graph."""
    function = dynamo_backend(graph, *arguments, **options)
    parts.append(function != graph.forward)
    return function


def ddp_in_buckets(model: nn.Module) -> Any:
    """``torch.compile`` of DDP, whose buckets have room for a layer: Dynamo cuts the graph as it does the buckets."""
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 400
    return torch.compile(ddp(model, bucket_cap_mb=400 / 2**20), backend=counted)


def fsdp2_of_compiled_blocks(model: Any) -> Any:
    for block in model:
        if isinstance(block, Block):
            block.compile(backend=counted)
    return fsdp2(model)


def train_step(model: Any, x: Tensor, number: int) -> None:
    """A backward; step 3 adds to the gradients of step 2."""
    if number != 3:
        model.zero_grad()
    model(x).square().mean().backward()


def accumulate(model: Any, x: Tensor, number: int) -> None:
    """Of each two steps the first is reduced with the second."""
    if number % 2 == 0:
        model.zero_grad()
    with model.no_sync() if number % 2 == 0 else contextlib.nullcontext():
        model(x).square().mean().backward()


def accumulate_sharded(model: Any, x: Tensor, number: int) -> None:
    """As `accumulate`, in FSDP2's words."""
    if number % 2 == 0:
        model.zero_grad()
    model.set_requires_gradient_sync(number % 2 == 1)
    model(x).square().mean().backward()


def uneven(model: Any, x: Tensor, number: int) -> None:
    """One process has fewer rows than the other, at each other step."""
    train_step(model, x[: 3 if dist.get_rank() and number % 2 else 5], number)


@dataclass(frozen=True)
class Case:
    """A wrapper and how it trains. ``expected`` is what is printed; ``scope`` is what the steps of ours run in, and
    ``ours`` the wrapper for them, where it is another than eager's. ``blocks`` is how many the model has: two for what
    takes them one by one."""

    wrap: Wrap
    step: Step = train_step
    expected: str = COMPILED
    tolerance: float = 2e-5
    scope: Scope = retrograd.enable
    ours: Wrap | None = None
    steps: int = 5
    blocks: int = 1


def in_overlap() -> AbstractContextManager[Any]:
    return retrograd.enable(hook_schedule="overlap")


def on_one_rank() -> AbstractContextManager[Any]:
    """The other trains eagerly."""
    return retrograd.enable() if dist.get_rank() else contextlib.nullcontext()


def through_dynamo(wrap: Wrap, ours: Wrap, expected: str) -> Case:
    return Case(wrap, scope=contextlib.nullcontext, ours=ours, expected=expected, blocks=2)


GROUPS: Mapping[str, Mapping[str, Case]] = {
    "ddp": {
        "ddp": Case(ddp),
        "ddp, small buckets that gradients are views of": Case(
            partial(ddp, gradient_as_bucket_view=True, bucket_cap_mb=1e-4)
        ),
        "ddp, overlap": Case(partial(ddp, bucket_cap_mb=1e-4), scope=in_overlap, blocks=2),
        "ddp, static graph": Case(partial(ddp, static_graph=True)),
        "ddp, unused parameters": Case(partial(ddp, find_unused_parameters=True)),
        "ddp, no_sync": Case(ddp, accumulate),
        "ddp, other sizes on one rank": Case(ddp, uneven, steps=6),
        "ddp, eager on the other rank": Case(ddp, scope=on_one_rank),
    },
    "fsdp1": {
        "fsdp1": Case(fsdp1),
        "fsdp1, original parameters": Case(partial(fsdp1, use_orig_params=True)),
        "fsdp1, sharded gradients": Case(partial(fsdp1, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)),
        "fsdp1, bfloat16": Case(
            partial(fsdp1, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
            tolerance=HALF,
            expected=NOT_FAKE,
        ),
        "fsdp1, by blocks": Case(fsdp1_of_blocks, blocks=2),
        "fsdp1, by blocks, overlap": Case(fsdp1_of_blocks, scope=in_overlap, blocks=2),
        "fsdp1, no_sync": Case(fsdp1, accumulate, expected=NOT_FAKE),
    },
    "fsdp2": {
        "fsdp2": Case(partial(fsdp2, reshard_after_forward=False)),
        "fsdp2, resharded after forward": Case(partial(fsdp2, reshard_after_forward=True), blocks=2),
        "fsdp2, overlap": Case(partial(fsdp2, reshard_after_forward=True), scope=in_overlap, blocks=2),
        "fsdp2, bfloat16": Case(
            partial(fsdp2, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
            tolerance=HALF,
        ),
        "fsdp2, set_requires_gradient_sync": Case(fsdp2, accumulate_sharded),
        "fsdp2, eager on the other rank": Case(fsdp2, scope=on_one_rank),
    },
    "parallel": {
        "tensor parallel": Case(tensor_parallel, expected=DTENSOR, blocks=2),
    },
    "dynamo": {
        "torch.compile of ddp": through_dynamo(ddp, ddp_in_buckets, f"{COMPILED} in 2 part(s)"),
        "torch.compile of fsdp2's blocks": through_dynamo(fsdp2, fsdp2_of_compiled_blocks, f"{COMPILED} in 1 part(s)"),
        "torch.compile of tensor parallel": through_dynamo(
            tensor_parallel,
            lambda model: torch.compile(tensor_parallel(model), backend=counted),
            f"{EAGER}: 1 part(s)",
        ),
    },
}
PIPELINES: Mapping[str, Any] = {"pipeline, GPipe": ScheduleGPipe, "pipeline, 1F1B": Schedule1F1B}
ONE_OF_EACH = "one of each"
"""A case of each wrapper and of each way to train, for those who do not have the time for all groups."""
_ONES = (
    *("ddp, other sizes on one rank", "fsdp1, no_sync", "fsdp1, by blocks"),
    *("fsdp2, eager on the other rank", "tensor parallel"),
    *("torch.compile of ddp", "torch.compile of tensor parallel"),
)
_CASES: Mapping[str, Mapping[str, Case]] = {
    **GROUPS,
    ONE_OF_EACH: {name: case for group in GROUPS.values() for name, case in group.items() if name in _ONES},
}


def train(case: Case) -> str:
    """Train two models side by side, and say how ours ran."""
    torch.manual_seed(0)
    # What Dynamo cuts into parts goes by bytes, of models with norms.
    plain = make_model(case.blocks, is_normed=case.ours is not None).to(device())
    models = [wrap(copy.deepcopy(plain)) for wrap in (case.wrap, case.ours or case.wrap)]
    before = len(retrograd.explain_recompiles())
    parts.clear()
    for number in range(case.steps):
        torch.manual_seed(10 * number + dist.get_rank())
        x = torch.randn(5, 4).to(device())
        for model, scope in zip(models, (contextlib.nullcontext, case.scope), strict=True):
            ran.clear()
            with scope():
                case.step(model, x, number)
        compare(models[0], models[1], case.tolerance)
    if case.ours is not None:
        return f"{COMPILED} in {len(parts)} part(s)" if all(parts) else f"{EAGER}: {parts.count(False)} part(s)"
    if case.scope is on_one_rank and not dist.get_rank():
        return "the scope is open on this rank too" if ran else COMPILED
    return describe(before)


def compare(eager: nn.Module, ours: nn.Module, tolerance: float) -> None:
    """Raise AssertionError where a gradient is not eager's."""
    for (name, expected), found in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        if found.grad is not None:
            torch.testing.assert_close(whole(found.grad), whole(expected.grad), rtol=tolerance, atol=tolerance / 20)


# One for each backward of ours that ran compiled since it was emptied.
ran: list[bool] = []


def count_compiled() -> None:
    """Have `ran` filled from here on."""
    module: Any = variants
    original = module.run_compiled

    def run(*arguments: Any) -> Any:
        ran.append(True)
        return original(*arguments)

    module.run_compiled = run


def describe(before: int) -> str:
    """How the last step ran, and what was refused since there were so many entries."""
    entries = retrograd.explain_recompiles()[before:]
    refused = [entry for entry in entries if entry.outcome == "runs eagerly"]
    if refused:
        return f"{EAGER}: {'; '.join(refused[0].reasons)}"
    return COMPILED if ran else "nothing ran compiled"


def whole(tensor: Any) -> Tensor:
    result: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result


def train_pipeline(schedule: Any) -> str:
    """Half of a model in each process, in two micro-batches."""
    torch.manual_seed(0)
    rank, plain = dist.get_rank(), make_model().to(device())
    halves = [copy.deepcopy(plain[2:] if rank else plain[:2]) for _ in range(2)]
    schedules = [
        schedule(
            PipelineStage(half, rank, RANKS, device()),
            n_microbatches=2,
            loss_fn=lambda y, target: (y - target).square().mean(),
        )
        for half in halves
    ]
    before = len(retrograd.explain_recompiles())
    for number in range(3):
        torch.manual_seed(number)
        x, target = torch.randn(6, 4).to(device()), torch.randn(6, 2).to(device())
        scopes: tuple[Scope, Scope] = (contextlib.nullcontext, retrograd.enable)
        for half, run, scope in zip(halves, schedules, scopes, strict=True):
            half.zero_grad()
            ran.clear()
            with scope():
                run.step(target=target) if rank else run.step(x)
        compare(halves[0], halves[1], 2e-5)
    return describe(before)


def run_group(group: str) -> None:
    """Train each case, and print its name and how it ran."""
    cases: dict[str, Callable[[], str]] = {name: partial(train, case) for name, case in _CASES[group].items()}
    if group == "parallel":
        cases |= {name: partial(train_pipeline, schedule) for name, schedule in PIPELINES.items()}
    for name, run in cases.items():
        # Without what the case before had captured: PyTorch's cache of captures goes by the graph alone.
        torch._C._dynamo.compiled_autograd.clear_cache()
        torch._dynamo.reset()
        print(f"{name}: {run()}", flush=True)


def expect(group: str) -> dict[str, str]:
    """What each case of a group is to print, by its name; of a reason its beginning."""
    expected = {name: case.expected for name, case in _CASES[group].items()}
    return expected | dict.fromkeys(PIPELINES, COMPILED) if group == "parallel" else expected


def find_surprises(group: str, text: str) -> list[str]:
    """The cases of a group that did not run as expected, by what a process wrote."""
    lines = text.splitlines()
    expected = [f"{name}: {how}" for name, how in expect(group).items()]
    return [line for line in expected if not any(printed.startswith(line) for printed in lines)]


@contextlib.contextmanager
def joined(kind: str, store: str, rank: int) -> Any:
    """Be one of the processes."""
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
    count_compiled()
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    yield
    dist.destroy_process_group()


def main(group: str, kind: str, store: str, rank: str) -> None:
    """Be process ``rank`` of those that meet at ``store``, on ``kind``, "cpu" or "cuda"."""
    with joined(kind, store, int(rank)):
        run_group(group)
    # Threads of the group may outlive it.
    sys.stdout.flush()
    os._exit(0)
