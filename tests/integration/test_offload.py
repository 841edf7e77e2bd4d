# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Residuals that are on the host between forward and backward. The moves are a stand-in's, on a CPU, which makes a copy
when it is waited for; tests/gpu/test_cuda_offload.py has those of a device."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from late_moves import LateMover, use_late_moves
from test_autograd import run_in_threads
from test_shorter_lifetimes import LOSSES, Deep, assert_close, gradients
from torch import Tensor, nn

import retrograd
from retrograd.contract.device_rates import DeviceRates
from retrograd.runtime.artifact import ArtifactError
from retrograd.runtime.cuda import residual_moves
from retrograd.runtime.steps.bound_function import BoundFunction

MIB = 1 << 20
BOTH = LOSSES["both outputs"]


@pytest.fixture(scope="module")
def model() -> Deep:
    torch.manual_seed(0)
    return Deep(layers=4)


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(1024, 256, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def mover(patch: pytest.MonkeyPatch) -> LateMover:
    return use_late_moves(patch)


def compiled(model: nn.Module, x: Tensor, policy: retrograd.SavePolicy, **options: Any) -> retrograd.CompiledBackward:
    return retrograd.compile_backward(
        model, (x,), partition="default", kernels="off", save_policy=policy, verify=False, **options
    )


@pytest.fixture(scope="module", params=[True, False], ids=["in stages", "whole"])
def step(model: Deep, x: Tensor, mover: LateMover, request: pytest.FixtureRequest) -> retrograd.CompiledBackward:
    return compiled(model, x, retrograd.offload(), free_early=request.param)


@pytest.fixture(scope="module")
def expected(model: Deep, x: Tensor) -> list[Tensor]:
    """Eager's gradients."""
    return gradients(model, BOTH(model(x)))


def test_gradients_and_bytes(
    model: Deep, x: Tensor, step: retrograd.CompiledBackward, mover: LateMover, expected: list[Tensor]
) -> None:
    report = step.explain().to_dict()
    assert report["offloaded_values"] >= 3
    assert report["offloaded_bytes"] == report["offloaded_values"] * MIB
    for _ in range(3):
        mover.log.clear()
        loss = BOTH(step(x))
        assert mover.moved("out") == report["offloaded_bytes"]
        assert mover.moved("back") == 0
        assert_close(gradients(model, loss), expected)
        assert mover.moved("back") == report["offloaded_bytes"]
        assert mover.under_way == 0
    del loss
    assert "ms to the host, at 25.0 GB/s" in str(step.explain().to_dict()["offload"])


def test_a_retained_graph_brings_them_back_twice(
    model: Deep, x: Tensor, step: retrograd.CompiledBackward, mover: LateMover, expected: list[Tensor]
) -> None:
    loss = BOTH(step(x))
    mover.log.clear()
    assert_close(gradients(model, loss, retain_graph=True), expected)
    assert_close(gradients(model, loss), expected)
    assert mover.moved("back") == 2 * step.explain().to_dict()["offloaded_bytes"]


def test_two_steps_in_flight(
    model: Deep, x: Tensor, step: retrograd.CompiledBackward, mover: LateMover, expected: list[Tensor]
) -> None:
    first, second = BOTH(step(x)), BOTH(step(2 * x))
    doubled = gradients(model, second)
    assert_close(gradients(model, first), expected)
    assert_close(gradients(model, BOTH(step(2 * x))), doubled)


def test_threads(
    model: Deep, x: Tensor, step: retrograd.CompiledBackward, mover: LateMover, expected: list[Tensor]
) -> None:
    found: list[list[Tensor]] = []

    def run() -> None:
        for _ in range(3):
            outputs = step(x)
            found.append(list(torch.autograd.grad(BOTH(outputs), list(model.parameters()))))

    run_in_threads([run] * 3)
    assert len(found) == 9
    for gradients_found in found:
        assert_close(gradients_found, expected)


def test_a_loss_that_leaves_out_an_output(model: Deep, x: Tensor, step: retrograd.CompiledBackward) -> None:
    expected = gradients(model, model(x)[0])
    for found in (gradients(model, step(x)[0]), gradients(model, step(x)[0])):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_hooks_of_saved_tensors_see_what_the_device_has(
    model: Deep, x: Tensor, step: retrograd.CompiledBackward, mover: LateMover, expected: list[Tensor]
) -> None:
    mover.log.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = BOTH(step(x))
    assert_close(gradients(model, loss), expected)
    assert mover.log == []


def test_a_call_that_is_captured_or_has_no_backward_moves_nothing(
    model: Deep, x: Tensor, step: retrograd.CompiledBackward, mover: LateMover, expected: list[Tensor]
) -> None:
    mover.log.clear()
    mover.is_recorded = True
    try:
        loss = BOTH(step(x))
    finally:
        mover.is_recorded = False
    assert_close(gradients(model, loss), expected)
    assert mover.log == []
    with retrograd.enable():
        loss = BOTH(step(x))
    assert mover.log == []
    assert_close(gradients(model, loss), expected)
    with torch.no_grad():
        torch.testing.assert_close(step(x)[0], model(x)[0])
    assert mover.log == []


def test_a_failure_half_way_waits_for_what_is_under_way(
    model: Deep,
    x: Tensor,
    step: retrograd.CompiledBackward,
    mover: LateMover,
    expected: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, calls, last = BoundFunction.__call__, list[str](), 0

    def failing(self: BoundFunction, arguments: Sequence[Any]) -> list[Tensor]:
        calls.append(self._name)
        if len(calls) == last:
            raise MemoryError("no more")
        return run(self, arguments)

    loss = BOTH(step(x))
    with monkeypatch.context() as patch:
        patch.setattr(BoundFunction, "__call__", failing)
        assert_close(gradients(model, loss, retain_graph=True), expected)
        # The second stage, or all that there is.
        last = min(2, len(calls))
        calls.clear()
        with pytest.raises(MemoryError):
            gradients(model, loss, retain_graph=True)
    assert mover.under_way == 0
    assert_close(gradients(model, loss), expected)


def test_the_host_keeps_nothing(model: Deep, x: Tensor, step: retrograd.CompiledBackward, mover: LateMover) -> None:
    gc.collect()
    assert not mover.hosts
    loss = BOTH(step(x))
    assert sum(t.nbytes for t in mover.hosts.values()) == step.explain().to_dict()["offloaded_bytes"]
    del loss
    assert not mover.hosts
    gradients(model, BOTH(step(x)))
    assert not mover.hosts


def test_first_calls_are_compared_where_they_are(
    model: Deep, x: Tensor, mover: LateMover, expected: list[Tensor]
) -> None:
    step = retrograd.compile_backward(
        model, (x,), partition="default", kernels="off", save_policy=retrograd.offload(), cache=False
    )
    mover.log.clear()
    assert_close(gradients(model, BOTH(step(x))), expected)
    assert mover.log == []
    assert_close(gradients(model, BOTH(step(x))), expected)
    size = step.explain().to_dict()["offloaded_bytes"]
    assert (mover.moved("out"), mover.moved("back")) == (size, size)
    assert all("verified by its first call" in line for line in step.explain().to_dict()["verification"])


def test_stages_lower_the_peak_that_is_predicted_and_measured(model: Deep, x: Tensor, mover: LateMover) -> None:
    plain = compiled(model, x, retrograd.SavePolicy(), free_early=False).explain().to_dict()
    step = compiled(model, x, retrograd.offload())
    gradients(model, BOTH(step(x)))
    report = step.explain().to_dict()
    assert report["peak_bytes_predicted"] < plain["peak_bytes_predicted"]
    assert report["peak_bytes_measured"] == pytest.approx(report["peak_bytes_predicted"], rel=0.01)
    # The timeline has residuals while they are there: two stages' at a time.
    stages = [stage["held"]["residuals"] for half in report["timeline"].values() for stage in half]
    assert 0 < max(stages) < report["offloaded_bytes"]


def test_rules_choose_what_goes(model: Deep, x: Tensor, mover: LateMover, expected: list[Tensor]) -> None:
    one = compiled(model, x, retrograd.offload(name="sin_1") | retrograd.saved_dtype("bf16", op="cos"))
    assert one.explain().to_dict()["offloaded_bytes"] == MIB
    assert_close(gradients(model, BOTH(one(x))), expected)
    packed = compiled(model, x, retrograd.offload(op="sin") | retrograd.saved_dtype("bf16", op="sin"))
    report = packed.explain().to_dict()
    assert report["offloaded_bytes"] == report["offloaded_values"] * MIB / 2
    loss = BOTH(packed(x))
    mover.log.clear()
    gradients(model, loss)
    assert mover.moved("back") == report["offloaded_bytes"]


def in_budget(model: nn.Module, x: Tensor, budget: int, policy: retrograd.SavePolicy) -> retrograd.CompiledBackward:
    return retrograd.compile_backward(
        model, (x,), partition="budget", memory_budget=budget, kernels="off", save_policy=policy, verify=False
    )


@pytest.mark.long
def test_a_budget_decides(
    model: Deep, x: Tensor, mover: LateMover, expected: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    maybe = retrograd.offload(within_budget=True)
    # A budget that everything keeps: nothing goes.
    roomy = in_budget(model, x, 1 << 30, maybe).explain().to_dict()
    assert "offloaded_bytes" not in roomy
    with pytest.raises(retrograd.InfeasibleBudget) as caught:
        in_budget(model, x, MIB, maybe)
    least = in_budget(model, x, int(caught.value.least), maybe)
    report = least.explain().to_dict()
    assert report["offloaded_bytes"] > 0
    assert report["peak_bytes_predicted"] <= caught.value.least < roomy["peak_bytes_predicted"]
    assert_close(gradients(model, BOTH(least(x))), expected)
    assert least.explain().to_dict()["peak_bytes_measured"] <= caught.value.least
    # What recomputation keeps as well is recomputed where the link is slow, and moved where it is fast.
    with pytest.raises(retrograd.InfeasibleBudget) as other:
        in_budget(model, x, MIB, retrograd.SavePolicy())
    budget = int(other.value.least)
    found = {}
    for way, rate in {"slow": 1e3, "fast": 1e18}.items():
        rates = DeviceRates(out=rate, back=rate, memory=1e11, flops=1e11)
        monkeypatch.setattr("retrograd.stagers.ASSUMED_RATES", rates)
        found[way] = in_budget(model, x, budget, maybe).explain().to_dict()
    assert "offloaded_bytes" not in found["slow"]
    assert found["fast"]["offloaded_bytes"] > 0
    assert found["slow"]["recomputed_flops"] > found["fast"]["recomputed_flops"] == 0


def test_within_budget_is_for_budgets(model: Deep, x: Tensor, mover: LateMover) -> None:
    with pytest.raises(ValueError, match="is for partition='budget'"):
        compiled(model, x, retrograd.offload(within_budget=True))
    with pytest.raises(TypeError, match="expected True or False"):
        retrograd.offload(within_budget="yes")  # type: ignore[arg-type]


@pytest.mark.long
def test_torch_compile(model: Deep, x: Tensor, mover: LateMover, expected: list[Tensor]) -> None:
    options: dict[str, Any] = {
        "save_policy": retrograd.offload(),
        "partition": "default",
        "kernels": "off",
        "verify": False,
    }
    step = torch.compile(model, backend="retrograd", options=options)
    loss = BOTH(step(x))
    mover.log.clear()
    assert_close(gradients(model, loss), expected)
    assert mover.moved("back") >= 3 * MIB


@pytest.mark.long
def test_dynamic_shapes(model: Deep, x: Tensor, mover: LateMover) -> None:
    step = compiled(model, x, retrograd.offload(), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=2)}})
    mover.log.clear()
    half = x[:512]
    found, expected = gradients(model, BOTH(step(half))), gradients(model, BOTH(model(half)))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    assert mover.moved("out") == mover.moved("back") == step.explain().to_dict()["offloaded_bytes"] / 2


@pytest.mark.long
def test_islands_run_between(mover: LateMover) -> None:
    class Ranked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.sin(self.first(x))
            ranked = torch.linalg.matrix_exp(h[:256] / 100)
            return torch.sin(self.second(torch.cat((ranked, h[256:])))).mean()

    torch.manual_seed(0)
    model, x = Ranked(), torch.randn(1024, 256)
    with pytest.warns(retrograd.EagerIslandWarning):
        step = compiled(model, x, retrograd.offload())
    expected = gradients(model, model(x))
    mover.log.clear()
    found = gradients(model, step(x))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
    assert mover.moved("back") == step.explain().to_dict()["offloaded_bytes"] > 0


def test_a_file_does_not_offload(model: Deep, x: Tensor, step: retrograd.CompiledBackward, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"compile without retrograd\.offload to save one"):
        step.save(tmp_path / "deep.vmfb")
    with pytest.raises(ValueError, match=r"leave out retrograd\.offload, or portable"):
        retrograd.compile_backward(model, (x,), save_policy=retrograd.offload(), portable=True)


@pytest.mark.parametrize("target", ["cpu", "vulkan", ("cpu", "cuda")])
def test_other_targets_are_refused(model: Deep, x: Tensor, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrograd.options._OFFLOADING", (("cuda",),))
    with pytest.raises(ValueError, match=r"and the target is '.*'; leave it out, or compile for 'cuda' alone"):
        retrograd.compile_backward(model, (x,), save_policy=retrograd.offload(), target=target)


def test_cuda_graphs_are_refused_or_left_out(model: Deep, x: Tensor, mover: LateMover) -> None:
    with pytest.raises(ValueError, match="leave out one of the two"):
        retrograd.compile_backward(model, (x,), save_policy=retrograd.offload(), cuda_graphs=True)
    step = compiled(model, x, retrograd.offload(), cuda_graphs="auto")
    assert "not captured" in step.explain().to_dict()["cuda_graphs"][0]


def test_the_mover_of_a_device_is_one_and_touches_it_late() -> None:
    device = torch.device("cuda", 0)
    assert residual_moves.mover_of(device) is residual_moves.mover_of(device)
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()
