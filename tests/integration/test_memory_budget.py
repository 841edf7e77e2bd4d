# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiling within a memory budget: gradients stay eager's, and the measured peak stays within the budget."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from models import Case
from suite import SUITE
from torch import nn

import retrograd
from retrograd.contract.roles import JOINT
from retrograd.dialects import ir
from retrograd.frontend.doors.capture import capture_joint
from retrograd.frontend.preparation.importer import import_graph
from retrograd.pipelines.analysis.kernels.liveness import compute_peak
from retrograd.pipelines.analysis.partition.budget import find_curve
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.partition_plan import find_default_partition, find_unsavable
from retrograd.pipelines.analysis.partition.read_graph import read_joint
from retrograd.pipelines.devices.targets import CPU
from retrograd.pipelines.infra.functions import find_function
from retrograd.pipelines.stages.staged import Progress, stage_module
from retrograd.pipelines.toolchain import lowering_steps
from retrograd.pipelines.toolchain.executable import measure_scratch
from retrograd.pipelines.toolchain.lowering import lower_to_linalg
from retrograd.pipelines.toolchain.lowering_steps import IN_ORDER, LOWERING

TOLERANCE = 2e-5


def make(name: str) -> Case:
    if name == "transformer":
        return SUITE["transformer"].make("test")
    # Narrow and deep on a large batch: residuals are most of its memory.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stages = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())]
        return Case(nn.Sequential(*stages), (torch.randn(256, 16),), lambda y: F.mse_loss(y, torch.zeros(256, 16)))


def gradients(case: Case, step: object) -> dict[str, torch.Tensor]:
    assert callable(step)
    case.loss(step(*case.args)).backward()
    return {name: t.grad for name, t in case.leaves().items() if t.grad is not None}


def import_joint(case: Case) -> ir.Module:
    with contextlib.ExitStack() as stack:
        captured = capture_joint(stack, case.model, case.args, None)
        return import_graph(captured.graph_module, captured.signature)


def joint_graph(case: Case) -> JointGraph:
    module = import_joint(case)
    with module.context, ir.Location.unknown():
        function = find_function(module.operation, JOINT)
        assert function is not None
        return read_joint(function).graph


@pytest.mark.short_cases("several_outputs")
@pytest.mark.parametrize("name", SUITE)
def test_more_memory_never_means_more_recomputation(name: str) -> None:
    graph = joint_graph(SUITE[name].make("test"))
    curve = find_curve(graph)
    high, low = compute_peak(graph, find_default_partition(graph)).bytes, curve.points[-1].peak
    picked = [curve.pick(low + (high - low) * step // 20) for step in range(21)]
    assert [p.peak for p in picked] == sorted(p.peak for p in picked)
    assert [p.cost for p in picked] == sorted((p.cost for p in picked), reverse=True)
    assert picked[-1].cost == 0
    for point in curve.points:
        assert find_unsavable(graph, point.plan) is None
        assert 0 <= curve.gap(point.peak) <= point.cost
    with pytest.raises(retrograd.InfeasibleBudget, match=f"the least feasible one is {low} bytes"):
        curve.pick(low - 1)


def check_budget(name: str, budget: float | int) -> retrograd.CompiledBackward:
    """Compile a model within a budget, which the measured peak has to honour; gradients are eager's."""
    ours, theirs = make(name), make(name)
    expected = gradients(theirs, theirs.model)
    step = retrograd.compile_backward(ours.model, ours.args, partition="budget", memory_budget=budget)
    found = gradients(ours, step)
    assert found.keys() == expected.keys()
    for leaf, gradient in expected.items():
        error = float((found[leaf] - gradient).norm() / gradient.norm().clamp_min(1e-12))
        assert error <= TOLERANCE, f"budget {budget}, gradient of {leaf}: {error:.2e}"
    report = step.explain().to_dict()
    assert report["peak_bytes_measured"] <= report["memory_budget"]
    assert report["partition"] == "budget"
    return step


@pytest.mark.long
def test_a_transformer_within_a_budget() -> None:
    """All its budgets are tried by ``make test-budgets``."""
    check_budget("transformer", 1.4)


def test_budgets_are_honoured() -> None:
    ours = make("mlp")
    with pytest.raises(retrograd.InfeasibleBudget, match="the least feasible one is") as caught:
        retrograd.compile_backward(ours.model, ours.args, partition="budget", memory_budget=0.01)
    least, whole = caught.value.least, caught.value.budget / 0.01
    assert least < 0.9 * whole
    steps = [check_budget("mlp", budget) for budget in (1.25, least)]
    reports = [step.explain().to_dict() for step in steps]
    assert [r["memory_budget"] for r in reports[-1:]] == [least]
    assert reports[0]["recompute_seconds"] == 0
    peaks = [r["peak_bytes_measured"] for r in reports]
    assert peaks == sorted(peaks, reverse=True)
    assert reports[-1]["recompute_seconds"] > 0
    curve = reports[-1]["pareto"]
    assert [peak for peak, _ in curve] == sorted((peak for peak, _ in curve), reverse=True)
    assert [cost for _, cost in curve] == sorted(cost for _, cost in curve)
    assert "peak by seconds recomputed" in str(steps[-1].explain())


class Residual(nn.Module):
    """A stem and a block of a residual network, on images large enough for the stem to be most of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.first = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x)
        return F.relu(y + self.second(self.first(y))).mean((2, 3))


@pytest.mark.long
def test_what_is_made_of_a_residual_is_not_kept_beside_it() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        case = Case(Residual(), (torch.randn(4, 3, 32, 32),), lambda y: y.square().mean())
    expected = {name: gradient.clone() for name, gradient in gradients(case, case.model).items()}
    for leaf in case.leaves().values():
        leaf.grad = None
    step = retrograd.compile_backward(case.model, case.args, partition="budget", memory_budget="640KiB")
    for name, gradient in gradients(case, step).items():
        error = float((gradient - expected[name]).norm() / expected[name].norm().clamp_min(1e-6))
        assert error <= TOLERANCE, f"gradient of {name}: {error:.2e}"
    report = step.explain().to_dict()
    assert report["peak_bytes_measured"] <= report["memory_budget"]


@pytest.mark.short_cases("bwd-split-columns")
@pytest.mark.parametrize("left", ["bwd-repeat-elementwise", "bwd-split-columns"])
def test_less_scratch_memory_is_taken_where_kernels_run_in_order(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the passes that are for memory there is less than with one of them."""
    case = Case(Residual(), (torch.randn(4, 3, 32, 32),), lambda y: y.square().mean())
    module = import_joint(case)
    with module.context, ir.Location.unknown():
        staged = stage_module(module, "min-cut", Progress(None)).texts["scheduled"].encode()
    target = CPU.in_order()
    both = measure_scratch(lower_to_linalg(staged, target, twins_alone=True), target)
    # Without an order, this one does for what all of a function's kernels read what ``bwd-repeat-elementwise`` does.
    for_memory = ("bwd-fold-elementwise", *(step.name for step in LOWERING if step.where is IN_ORDER))
    passes = [step for step in LOWERING if step.name not in for_memory or step.name == left]
    monkeypatch.setattr(lowering_steps, "LOWERING", tuple(passes))
    one = measure_scratch(lower_to_linalg(staged, target, twins_alone=True), target)
    assert both["backward_into"] < 0.8 * one["backward_into"]


class Gated(nn.Module):
    """A product of 2**26 multiplications, of which a CPU packs the operands, times two tensors of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 1024) / 16)

    def forward(self, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return x @ self.weight * up * down


def test_what_takes_a_packed_product_is_not_packed() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        gates = torch.randn(2, 256, 1024)
        case = Case(Gated(), (torch.randn(256, 256), *gates), lambda y: y.square().mean())
    expected = {name: gradient.clone() for name, gradient in gradients(case, case.model).items()}
    for leaf in case.leaves().values():
        leaf.grad = None
    step = retrograd.compile_backward(case.model, case.args, partition="min-cut", kernels="off")
    for name, gradient in gradients(case, step).items():
        torch.testing.assert_close(gradient, expected[name], rtol=TOLERANCE, atol=1e-7)
    # Packed operands and the product, one of which lies in the output's storage; in its kernel, what takes the product
    # would read packed copies of both gates.
    report = step.explain().to_dict()
    assert report["forward_transient_bytes"] == 4 * (256 * 256 + 256 * 1024)
    assert report["peak_bytes_measured"] == report["peak_bytes_predicted"]


@pytest.mark.parametrize(
    ("partition", "budget", "message"),
    [
        ("budget", None, "unreadable memory budget None; give bytes"),
        ("budget", True, "unreadable memory budget True; give bytes"),
        ("budget", "plenty", "unreadable memory budget 'plenty'; give bytes"),
        ("budget", "fre", "unreadable memory budget 'fre'; give bytes .*, or 'free' for what the device has left"),
        ("budget", "", "unreadable memory budget ''; give bytes"),
        ("budget", math.inf, "unreadable memory budget inf; give bytes"),
        ("budget", math.nan, "unreadable memory budget nan; give bytes"),
        ("budget", "-1", "memory budget '-1' is not above zero; give bytes"),
        ("budget", 0, "memory budget 0 is not above zero; give bytes"),
        ("budget", -1.0, "memory budget -1.0 is not above zero; give bytes"),
        ("cheap", None, "partition 'cheap' is not one of default, min-cut, budget"),
        ("min-cut", "64MiB", "partition 'min-cut' takes no memory_budget; use partition='budget'"),
    ],
)
def test_budgets_that_make_no_sense(partition: str, budget: object, message: str) -> None:
    case = make("mlp")
    with pytest.raises(ValueError, match=message):
        retrograd.compile_backward(case.model, case.args, partition=partition, memory_budget=budget)  # type: ignore[arg-type]
