# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Backwards in stages: gradients as eager's, residuals freed as it goes, and the peak that was predicted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from measure_memory import held_at_most
from torch import Tensor, nn

import retrograd
from retrograd.options import Request
from retrograd.runtime.steps.compiled import CompiledBackward


class Deep(nn.Module):
    """A few layers whose residuals are a MiB each; the last output is no loss."""

    def __init__(self, width: int = 256, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x.pow(2).mean(), x.cos()


@pytest.fixture(scope="module")
def model() -> Deep:
    torch.manual_seed(0)
    return Deep()


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(1024, 256, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def step(model: Deep, x: Tensor) -> CompiledBackward:
    return retrograd.compile_backward(model, (x,), partition="default", free_early=True, kernels="off")


def gradients(model: nn.Module, loss: Tensor, **options: Any) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    loss.backward(**options)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


LOSSES: dict[str, Callable[[tuple[Tensor, Tensor]], Tensor]] = {
    "both outputs": lambda out: out[0] + out[1].sum() / 1000,
    "the loss alone": lambda out: out[0],
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_gradients(
    model: Deep, x: Tensor, step: CompiledBackward, loss: Callable[[tuple[Tensor, Tensor]], Tensor]
) -> None:
    expected = gradients(model, loss(model(x)))
    for _ in range(3):
        assert_close(gradients(model, loss(step(x))), expected)


def test_a_backward_runs_twice_where_its_graph_is_retained(model: Deep, x: Tensor, step: CompiledBackward) -> None:
    expected = gradients(model, LOSSES["both outputs"](model(x)))
    loss = LOSSES["both outputs"](step(x))
    assert_close(gradients(model, loss, retain_graph=True), expected)
    assert_close(gradients(model, loss), expected)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_step_takes_what_was_predicted_and_less_than_in_one_piece(
    model: Deep, x: Tensor, step: CompiledBackward
) -> None:
    def run() -> None:
        LOSSES["both outputs"](step(x)).backward()

    run()
    for parameter in model.parameters():
        parameter.grad = None
    report = step.explain().to_dict()
    assert report["stages"] > 2
    assert sum(size for size, _ in report["fullest"]) == report["peak_bytes_predicted"]
    assert report["peak_bytes_measured"] == pytest.approx(report["peak_bytes_predicted"], rel=0.01)
    # The loss of this test and its gradient, a MiB each, are torch's own.
    assert held_at_most(run) <= report["peak_bytes_predicted"] + (3 << 20)
    whole = retrograd.compile_backward(model, (x,), partition="default", kernels="off")
    assert report["peak_bytes_predicted"] < whole.explain().to_dict()["peak_bytes_predicted"]


def test_nothing_is_left_of_a_backward(model: Deep, x: Tensor, step: CompiledBackward) -> None:
    """Nothing that a backward in stages works with is there when it is done."""
    loss = LOSSES["both outputs"](step(x))
    sizes = []

    def look() -> None:
        gc.collect()
        sizes.append(sum(t.numel() for t in gc.get_objects() if type(t) is Tensor and t.shape == x.shape))

    look()
    gradients(model, loss)
    del loss
    look()
    assert sizes[1] <= sizes[0]


def test_what_is_saved_is_whole_and_says_its_own_peak(
    model: Deep, x: Tensor, step: CompiledBackward, tmp_path: Path
) -> None:
    step.save(tmp_path / "step.vmfb")
    loaded = retrograd.load(tmp_path / "step.vmfb", model)
    expected = gradients(model, LOSSES["both outputs"](model(x)))
    assert_close(gradients(model, LOSSES["both outputs"](loaded(x))), expected)
    report = loaded.explain().to_dict()
    assert report["stages"] == 2
    assert report["peak_bytes_measured"] == pytest.approx(report["peak_bytes_predicted"], rel=0.01)


@pytest.mark.long
def test_through_dynamo(model: Deep, x: Tensor) -> None:
    compiled = torch.compile(model, backend="retrograd", options={"partition": "default", "free_early": True})
    expected = gradients(model, LOSSES["both outputs"](model(x)))
    for _ in range(2):
        assert_close(gradients(model, LOSSES["both outputs"](compiled(x))), expected)


def test_functions_are_cut_by_themselves_where_that_saves_enough(
    model: Deep, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = retrograd.compile_backward(model, (x,), partition="default", kernels="off")
    assert small.explain().to_dict()["stages"] == 2
    monkeypatch.setattr("retrograd.options._AUTO_GAIN", 1 << 20)
    large = retrograd.compile_backward(model, (x,), partition="default", kernels="off")
    for loss in (LOSSES["the loss alone"], LOSSES["both outputs"]):
        expected = gradients(model, loss(model(x)))
        assert_close(gradients(model, loss(large(x))), expected)
        assert_close(gradients(model, loss(large(x))), expected)
    assert large.explain().to_dict()["stages"] > 2


@pytest.mark.parametrize(
    ("given", "gain"),
    [
        ({}, 32 << 20),
        ({"free_early": True}, 1 << 20),
        ({"free_early": False}, None),
        ({"partition": "budget", "memory_budget": 0.5}, None),
        ({"target": ("cpu", "vulkan")}, None),
        ({"target": "cuda:sm_90"}, None),
        ({"target": "cuda:sm_90", "free_early": True}, 1 << 20),
    ],
    ids=["auto", "asked for", "not wanted", "budget", "vulkan", "cuda", "cuda, asked for"],
)
def test_what_cutting_has_to_save(given: dict[str, Any], gain: int | None) -> None:
    assert Request(**given).on([]).cut_gain == gain


@pytest.mark.short_cases("auto")
@pytest.mark.parametrize("free_early", ["auto", True])
def test_a_budget_that_functions_in_one_piece_do_not_keep(free_early: Any) -> None:
    # No gradient of a weight fits where a residual was.
    torch.manual_seed(0)
    model, x = Deep(512), torch.randn(400, 512)
    given: dict[str, Any] = {"partition": "budget", "kernels": "off"}
    with pytest.raises(retrograd.InfeasibleBudget) as caught:
        retrograd.compile_backward(model, (x,), memory_budget=0.01, free_early=False, **given)
    assert caught.value.eager is not None
    budget = caught.value.least - 1
    step = retrograd.compile_backward(model, (x,), memory_budget=budget, free_early=free_early, **given)
    for loss in LOSSES.values():
        expected = gradients(model, loss(model(x)))
        assert_close(gradients(model, loss(step(x))), expected)
        assert_close(gradients(model, loss(step(x))), expected)
    report = step.explain().to_dict()
    assert report["stages"] > 2
    assert report["peak_bytes_measured"] <= budget


def test_what_is_free_as_a_budget(model: Deep, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrograd.options.available_bytes", lambda device: 100 << 20)
    step = retrograd.compile_backward(model, (x,), partition="budget", memory_budget="free", free_early=False)
    report = step.explain().to_dict()
    assert (report["memory_budget"], report["recomputed_flops"]) == (100 << 20, 0)
    monkeypatch.setattr("retrograd.options.available_bytes", lambda device: None)
    with pytest.raises(ValueError, match="how much memory is free on cpu is not known; give bytes"):
        retrograd.compile_backward(model, (x,), partition="budget", memory_budget="free")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": ("cpu", "vulkan")}, "which Vulkan does not reach"),
        ({"portable": True}, "functions in one piece"),
    ],
    ids=["vulkan", "portable"],
)
def test_what_cannot_be_cut_is_refused(model: Deep, x: Tensor, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        retrograd.compile_backward(model, (x,), free_early=True, **given)
    with pytest.raises(TypeError, match="free_early is 'auto', True or False"):
        retrograd.compile_backward(model, (x,), free_early="yes")  # type: ignore[arg-type]
