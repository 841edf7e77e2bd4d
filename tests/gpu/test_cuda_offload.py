# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Residuals of a CUDA device on its host: gradients bit for bit as without, memory that is free meanwhile, and steps
that overlap, fail or are repeated."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MODELS
from steps import on_device, require_device
from torch import Tensor, nn

import retrograd
from retrograd.runtime.artifact import ArtifactError
from retrograd.runtime.programs.executor import Program

MIB = 1 << 20
KINDS = {"in stages": True, "whole": False}


def setup_module() -> None:
    require_device()


class Deep(nn.Module):
    """Layers that save 4 MiB each."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x.pow(2).mean()


def make(layers: int = 8) -> tuple[Deep, Tensor]:
    torch.manual_seed(0)
    return Deep(layers).cuda(), torch.randn(2048, 512, device="cuda")


def compiled(model: nn.Module, args: Any, **options: Any) -> retrograd.CompiledBackward:
    """With residuals kept as eager keeps them; the same kernels with offloading and without."""
    return retrograd.compile_backward(model, args, partition="default", **{"verify": False, **options})


def gradients(model: nn.Module, loss: Tensor, **options: Any) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    loss.backward(**options)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def wait_for(size: int) -> None:
    """See that no more than so much is allocated: the engine's thread lets go of an exception after it was raised, and
    its frames, with what is in them, hold it in turn."""
    end = time.monotonic() + 10
    while allocated() != size and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert allocated() == size


def step_peak(model: nn.Module, step: retrograd.CompiledBackward, x: Tensor) -> int:
    """The most bytes that a step takes beyond what was there before it."""
    for parameter in model.parameters():
        parameter.grad = None
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    step(x).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def loss_gradients(model: nn.Module, step: retrograd.CompiledBackward, x: Tensor) -> list[Tensor]:
    return gradients(model, step(x))


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def without_moves(step: retrograd.CompiledBackward, run: Callable[[], Any]) -> Any:
    """What ``run`` gives where nothing is moved: hooks of saved tensors are open."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return run()


@pytest.mark.parametrize("early", KINDS.values(), ids=KINDS)
def test_gradients_bit_for_bit_and_memory_after_the_forward(early: bool) -> None:
    model, x = make()
    step = compiled(model, (x,), save_policy=retrograd.offload(), free_early=early)
    size = step.explain().to_dict()["offloaded_bytes"]
    assert size >= 7 * 4 * MIB
    expected = without_moves(step, lambda: gradients(model, step(x)))
    for _ in range(3):
        assert_same(gradients(model, step(x)), expected)
    for parameter in model.parameters():
        parameter.grad = None
    before = allocated()
    kept = without_moves(step, lambda: step(x))
    with_all = allocated() - before
    del kept
    assert allocated() == before
    kept = step(x)
    assert with_all - (allocated() - before) == size
    del kept
    assert allocated() == before


@pytest.mark.parametrize("early", KINDS.values(), ids=KINDS)
def test_a_retained_graph(early: bool) -> None:
    model, x = make()
    step = compiled(model, (x,), save_policy=retrograd.offload(), free_early=early)
    expected = without_moves(step, lambda: gradients(model, step(x)))
    loss = step(x)
    for retain in (True, True, False):
        assert_same(gradients(model, loss, retain_graph=retain), expected)


@pytest.mark.parametrize("early", KINDS.values(), ids=KINDS)
def test_steps_in_flight(early: bool) -> None:
    model, x = make()
    step = compiled(model, (x,), save_policy=retrograd.offload(), free_early=early)
    expected = [without_moves(step, partial(loss_gradients, model, step, n * x)) for n in (1, 2, 3)]
    losses = [step(n * x) for n in (1, 2, 3)]
    for place in (1, 2, 0):
        assert_same(gradients(model, losses[place]), expected[place])


def test_on_streams_of_the_users_and_in_threads() -> None:
    model, x = make()
    step = compiled(model, (x,), save_policy=retrograd.offload())
    expected = without_moves(step, lambda: gradients(model, step(x)))
    torch.cuda.synchronize()
    found: list[tuple[Tensor, ...]] = []

    def run() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(5):
                given = torch.autograd.grad(step(x), list(model.parameters()))
                stream.synchronize()
                found.append(given)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 15
    for given in found:
        assert_same(list(given), expected)


def test_two_hundred_steps_flat() -> None:
    model, x = make()
    step = compiled(model, (x,), save_policy=retrograd.offload())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            step(x).backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    train(10)
    before, reserved = allocated(), torch.cuda.memory_reserved()
    host = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    train(200)
    assert allocated() == before
    assert torch.cuda.memory_reserved() == reserved
    # The host queues steps ahead of the device, each with copies of its own.
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= max(2 * host, host + 256 * MIB)


def test_a_failure_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make()
    step = compiled(model, (x,), save_policy=retrograd.offload(), free_early=True)
    expected = gradients(model, step(x))
    for parameter in model.parameters():
        parameter.grad = None
    before = allocated()
    run = Program._invoke
    assert step.explain().to_dict()["stages"] >= 4
    for fails_at in (1, 2):
        calls = 0

        def failing(self: Program, *args: Any, at: int = fails_at) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise MemoryError("no more")
            run(self, *args)

        for half in ("forward", "backward"):
            loss = step(x) if half == "backward" else None
            calls = 0
            with monkeypatch.context() as patch:
                patch.setattr(Program, "_invoke", failing)
                patch.setattr(step._parts.program, "short_calls", _Nothing())
                with pytest.raises(MemoryError):
                    step(x) if loss is None else loss.backward()
            del loss
            wait_for(before)
    assert_same(gradients(model, step(x)), expected)


class _Nothing(dict[str, Any]):
    """No call is known, and none is kept."""

    def __setitem__(self, key: str, value: Any) -> None:
        return None


@pytest.mark.parametrize("name", ["gpt2", "resnet18", "mlp"])
def test_models(name: str) -> None:
    case = on_device(name)
    model = case.model
    assert isinstance(model, nn.Module)
    step = compiled(model, case.args, save_policy=retrograd.offload(min_bytes=1))
    assert step.explain().to_dict()["offloaded_bytes"] > 0
    expected = without_moves(step, lambda: gradients(model, case.loss(step(*case.args))))
    for _ in range(2):
        found = gradients(model, case.loss(step(*case.args)))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_first_calls_are_compared_before_anything_moves() -> None:
    model, x = make()
    step = compiled(model, (x,), save_policy=retrograd.offload(), verify="first", cache=False)
    expected = gradients(model, step(x))
    assert all("verified by its first call" in line for line in step.explain().to_dict()["verification"])
    assert_same(gradients(model, step(x)), expected)


def test_peak_as_predicted() -> None:
    model, x = make(16)
    plain = compiled(model, (x,))
    step = compiled(model, (x,), save_policy=retrograd.offload())
    step(x).backward()
    report = step.explain().to_dict()
    assert report["peak_bytes_measured"] == pytest.approx(report["peak_bytes_predicted"], rel=0.03)
    assert report["peak_bytes_predicted"] < plain.explain().to_dict()["peak_bytes_predicted"] / 2
    assert step_peak(model, step, x) <= report["peak_bytes_predicted"] * 1.05
    assert "GB/s" in report["offload"][0]


def test_a_budget_decides() -> None:
    model, x = make(16)
    maybe = retrograd.offload(within_budget=True)

    def within(budget: int) -> retrograd.CompiledBackward:
        return retrograd.compile_backward(
            model, (x,), partition="budget", memory_budget=budget, save_policy=maybe, verify=False
        )

    assert "offloaded_bytes" not in within(4 << 30).explain().to_dict()
    with pytest.raises(retrograd.InfeasibleBudget) as caught:
        within(MIB)
    step = within(caught.value.least)
    expected = gradients(model, model(x))
    for _ in range(2):
        for one, other in zip(gradients(model, step(x)), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
    report = step.explain().to_dict()
    assert report["peak_bytes_measured"] <= caught.value.least
    assert step_peak(model, step, x) <= caught.value.least * 1.03
    print("least", caught.value.least, {k: v for k, v in report.items() if "offload" in k or "recompute" in k})


def test_copies_run_beside_kernels() -> None:
    model, x = make()
    step = compiled(model, (x,), save_policy=retrograd.offload())
    for _ in range(3):
        gradients(model, step(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        gradients(model, step(x))
        torch.cuda.synchronize()
    events = trace.events()
    out = [e for e in events if "DtoH" in e.name and "Pinned" in e.name]
    back = [e for e in events if "HtoD" in e.name and "Pinned" in e.name]
    count = step.explain().to_dict()["offloaded_values"]
    assert (len(out), len(back)) == (count, count)


def test_a_graph_of_the_users_that_is_captured() -> None:
    model, x = make()
    step = compiled(model, (x,), save_policy=retrograd.offload())
    expected = without_moves(step, lambda: gradients(model, step(x)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients(model, step(x))
    torch.cuda.current_stream().wait_stream(side)
    for parameter in model.parameters():
        parameter.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(x).backward()
    graph.replay()
    torch.cuda.synchronize()
    assert_same([p.grad for p in model.parameters() if p.grad is not None], expected)


def test_a_backward_that_is_captured_as_it_runs() -> None:
    model, x = make()
    step = compiled(model, (x,), save_policy=retrograd.offload())
    expected = without_moves(step, lambda: gradients(model, step(x)))
    for _ in range(3):
        loss = step(x)
        with retrograd.enable():
            found = gradients(model, loss)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
        with retrograd.enable():
            found = gradients(model, step(x))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_what_is_refused(tmp_path: Path) -> None:
    case = MODELS["mlp"].make("test")
    with pytest.raises(ValueError, match="compile for 'cuda' alone"):
        retrograd.compile_backward(case.model, case.args, save_policy=retrograd.offload())
    model, x = make()
    with pytest.raises(ValueError, match="leave out one of the two"):
        compiled(model, (x,), save_policy=retrograd.offload(), cuda_graphs=True)
    with pytest.raises(ArtifactError, match=r"compile without retrograd\.offload"):
        compiled(model, (x,), save_policy=retrograd.offload()).save(tmp_path / "deep.vmfb")
