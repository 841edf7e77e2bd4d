# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""DDP and FSDP, of one process, under ``retrograd.enable()``: eager's gradients; their hooks count as communication."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import retrograd
from retrograd.frontend.autograd.engine import reducers
from retrograd.frontend.autograd.tracing.trace import trace_backward


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS: dict[str, Any] = {
    "ddp": DistributedDataParallel,
    "fsdp1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "fsdp2": shard,
}


def whole(tensor: Any) -> torch.Tensor:
    result: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result


def train(wrapper: Any, schedule: Any) -> list[str]:
    """Two models side by side; returns what the compiled one is told."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    models = [wrapper(copy.deepcopy(plain)) for _ in range(2)]
    before = len(retrograd.explain_recompiles())
    for _ in range(3):
        x = torch.randn(5, 4)
        contexts: list[AbstractContextManager[None]] = [
            contextlib.nullcontext(),
            retrograd.enable(hook_schedule=schedule),
        ]
        for model, context in zip(models, contexts, strict=True):
            model.zero_grad()
            loss = model(x).square().mean()
            with context:
                loss.backward()
        for ours, eager in zip(models[1].parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), whole(eager.grad), rtol=2e-5, atol=1e-6)
    return [str(entry) for entry in retrograd.explain_recompiles()[before:]]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.long_cases("ddp-eager-order", "fsdp1-overlap", "fsdp2-overlap")
@pytest.mark.parametrize("schedule", ["eager-order", "overlap"])
@pytest.mark.parametrize("name", list(WRAPPERS))
def test_training_is_eagers(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    communicating = []

    def remember(*args: Any, **given: Any) -> Any:
        traced = trace_backward(*args, **given)
        communicating.append(traced.captured.communication)
        return traced

    monkeypatch.setattr("retrograd.frontend.autograd.steps.compilation.trace_backward", remember)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        entries = train(WRAPPERS[name], schedule)
    assert not any("runs eagerly" in entry for entry in entries), entries
    assert communicating and all(communicating)


def reduced(plain: nn.Module, schedule: Any) -> tuple[list[list[str]], list[torch.Tensor]]:
    """Trains a model with DDP's own reducer, which doubles gradients; with a schedule, under `retrograd.enable`. Gives
    what was called at each step, and all gradients."""
    model = DistributedDataParallel(copy.deepcopy(plain), bucket_cap_mb_list=[0, 0])
    calls: list[list[str]] = []
    gradients = []

    def double(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls[-1].append(f"reduce bucket {bucket.index()}")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(2 * bucket.buffer())
        return future

    model.register_comm_hook(None, lambda _, bucket: double(bucket))
    first, second = list(model.parameters())[:2]
    first.register_hook(lambda _: calls[-1].append("gradient of the first"))
    second.register_post_accumulate_grad_hook(lambda _: calls[-1].append("the second is there"))
    torch.manual_seed(1)
    for step in range(5):
        calls.append([])
        # Accumulated without the other processes' at step 1, and on top of that at step 2.
        with model.no_sync() if step == 1 else contextlib.nullcontext():
            loss = model(torch.randn(5, 4)).square().mean()
            # Step 3 is an eager one.
            is_ours = schedule is not None and step != 3
            with retrograd.enable(hook_schedule=schedule) if is_ours else contextlib.nullcontext():
                loss.backward()
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if step != 1:
            model.zero_grad()
    return calls, gradients


def test_the_reducer_in_cpp_reduces_as_in_eager() -> None:
    """Bucket by bucket, while the backward runs."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    before = len(retrograd.explain_recompiles())
    (calls, gradients), (expected_calls, expected) = reduced(plain, "eager-order"), reduced(plain, None)
    assert calls == expected_calls
    assert any("reduce bucket 1" in step for step in calls)
    torch.testing.assert_close(gradients, expected, rtol=2e-5, atol=1e-6)
    entries = [entry.outcome for entry in retrograd.explain_recompiles()[before:]]
    assert "compiled" in entries and "runs eagerly" not in entries, entries


@pytest.mark.parametrize("caps", [[0, 1], [0, 0], None], ids=str)
def test_buckets_are_those_that_the_reducer_makes_after_a_first_step(
    caps: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which gradients are there; a function is cut where one is full, not at each gradient."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 600), nn.Tanh(), nn.Linear(600, 600))
    found: list[dict[int, int]] = []

    def remember(model: Any, order: Any) -> dict[int, int]:
        found.append(assign(model, order))
        return found[-1]

    assign = reducers._assign_buckets
    monkeypatch.setattr(reducers, "_assign_buckets", remember)
    model = DistributedDataParallel(plain, bucket_cap_mb_list=caps)
    for _ in range(3):
        loss = model(torch.randn(5, 4)).square().mean()
        with retrograd.enable():
            loss.backward()
    (buckets,) = found
    sizes = [0] * (1 + max(buckets.values()))
    for place, parameter in enumerate(model.parameters()):
        sizes[buckets[place]] += 4 * parameter.numel()
    assert ", ".join(map(str, sizes)) == model._get_ddp_logging_data()["rebuilt_bucket_sizes"]


@pytest.mark.parametrize("obstacle", ["mixed_precision", "frozen"])
def test_a_reducer_that_stays_in_cpp_runs_eagerly_and_says_why(obstacle: str) -> None:
    """PyTorch's mixed_precision needs a device's events: a model that has it only while it runs backward stands for
    one. A parameter that is frozen later has no gradient in either."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    models = [DistributedDataParallel(copy.deepcopy(plain), find_unused_parameters=True) for _ in range(2)]
    before = len(retrograd.explain_recompiles())
    contexts: list[Any] = [contextlib.nullcontext, retrograd.enable]
    for model, context in zip(models, contexts, strict=True):
        for seed in range(3):
            torch.manual_seed(seed)
            loss = model(torch.randn(5, 4)).square().mean()
            if obstacle == "mixed_precision":
                model.mixed_precision = _MixedPrecision(torch.bfloat16)
            else:
                plain_layer: Any = model.module[2]
                plain_layer.bias.requires_grad_(False)
            with context():
                loss.backward()
            model.mixed_precision = None
    eager, ours = ([p.grad for p in model.parameters()] for model in models)
    torch.testing.assert_close(ours, eager, rtol=2e-5, atol=1e-6)
    (entry,) = retrograd.explain_recompiles()[before:]
    assert "runs eagerly" in str(entry) and obstacle in str(entry), str(entry)


def test_communication_that_users_mark_starts_first() -> None:
    def run(schedule: Any) -> list[str]:
        log: list[str] = []
        a, b = (torch.ones(3, requires_grad=True) for _ in range(2))
        x, y = a.sin(), b.cos()
        x.register_hook(retrograd.communication(lambda gradient: log.append("communication")))
        y.register_hook(lambda gradient: log.append("other"))
        for _ in range(2):
            log.clear()
            with retrograd.enable(hook_schedule=schedule):
                torch.autograd.grad((x * y).sum(), (a, b), retain_graph=True)
        return log

    assert run("eager-order") == ["other", "communication"]
    assert run("overlap") == ["communication", "other"]
