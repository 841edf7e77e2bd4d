# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiling within a budget, on modules of a few ops: what is tried, what is refused, what is said of it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from graph_text import JOINT

from retrograd.contract.device_rates import DeviceRates
from retrograd.contract.tensors import TensorSpec
from retrograd.dialects.context import make_context
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.pareto import Curve, InfeasibleBudget, Point
from retrograd.pipelines.analysis.partition.partition_plan import PartitionPlan
from retrograd.pipelines.analysis.partition.policies import POLICIES, PointOfCurve, Policy
from retrograd.pipelines.devices.targets import CPU, Target
from retrograd.pipelines.stages import budgeted
from retrograd.pipelines.stages.budgeted import BudgetBuilder, thin_out
from retrograd.pipelines.stages.interface import port_bytes
from retrograd.pipelines.stages.peaks import forward_alone, step_peak
from retrograd.pipelines.stages.staged import Progress, StagedModule
from retrograd.pipelines.toolchain.executable import Executable
from retrograd.runtime.reports.report import plot_curve

NO_PLAN, NO_GRAPH = PartitionPlan("budget", (), (), (), (), 0, 0), JointGraph((), (), (), frozenset(), (), ())
# Output, gradient, and both residuals; output, gradient and one.
ALL, LESS = 4096, 3072


class FakeIree:
    """Says what scratch memory a module takes: `scratch` with packed operands, less by `saved` with kernels in order,
    `plain` with plain flags."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, scratch: int = 0, plain: int = 0, surprise: int = 0, saved: int = 0
    ) -> None:
        self.scratch, self.plain, self.surprise, self.saved = scratch, plain, surprise, saved
        self.compiled: list[tuple[int, bool]] = []
        self.targets: list[Target] = []
        self.laid_out: list[Target] = []
        monkeypatch.setattr(budgeted, "lower_to_linalg", lambda source, target, twins_alone, donating: "")
        monkeypatch.setattr(budgeted, "measure_scratch", self.lay_out)
        monkeypatch.setattr(budgeted, "build_executable", self.build)

    def lay_out(self, linalg: str, target: Target) -> dict[str, int]:
        self.laid_out.append(target)
        return self.sizes(target)

    def sizes(self, target: Target, more: int = 0) -> dict[str, int]:
        scratch = self.scratch - self.saved * (target == CPU.in_order())
        return {"forward_into": 0, "backward_into": (self.plain if is_plain(target) else scratch) + more}

    def build(self, staged: StagedModule, target: Target, *_: Any, **__: Any) -> tuple[Executable, bool]:
        self.compiled.append((staged.partition["saved_bytes"], is_plain(target)))
        self.targets.append(target)
        return Executable(b"", (), self.sizes(target, 0 if is_plain(target) else self.surprise), 0.0), False


def is_plain(target: Target) -> bool:
    return target.ladder == CPU.in_order().ladder[-1:]


def build(budget: int | float, eager_peak: int | None = None) -> dict[str, Any]:
    builder = BudgetBuilder(JOINT, make_context(), CPU, {}, Progress(), None)
    return builder.build(budget, eager_peak)[0].partition


def test_what_default_saves_is_kept_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    iree = FakeIree(monkeypatch)
    report = build(ALL)
    assert iree.compiled == [(2048, False)]
    assert (report["policy"], report["memory_budget"], report["recompute_seconds"]) == ("budget", ALL, 0.0)
    assert build(1.0)["memory_budget"] == ALL
    assert [peak for peak, _ in report["pareto"]] == [ALL, LESS]


def test_a_lower_budget_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    iree = FakeIree(monkeypatch)
    report = build(0.75)
    assert iree.compiled == [(1024, False)]
    assert report["memory_budget"] == LESS
    assert report["recompute_seconds"] > 0


def test_a_fraction_is_of_what_eager_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    iree = FakeIree(monkeypatch)
    report = build(0.5, 2 * LESS)
    assert iree.compiled == [(1024, False)]
    assert (report["memory_budget"], report["eager_peak_bytes"]) == (LESS, 2 * LESS)
    # Bytes are bytes.
    assert build(LESS, 10 * LESS)["memory_budget"] == LESS
    with pytest.raises(InfeasibleBudget, match=f"the least feasible one is {LESS} bytes, and a step in eager takes 10"):
        build(0.5, 10)


def test_what_no_plan_goes_below_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """One half of the step alone takes more: the backward, or the forward."""
    FakeIree(monkeypatch)
    with pytest.raises(
        InfeasibleBudget, match=r"; whatever is saved, its backward holds \d+ bytes where it holds most$"
    ):
        build(1)
    monkeypatch.setattr(budgeted, "forward_alone", lambda *_: 2 * LESS)
    with pytest.raises(InfeasibleBudget, match=f"; whatever is saved, its forward takes {2 * LESS} bytes$"):
        build(1)


def test_scratch_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    iree = FakeIree(monkeypatch, scratch=100, plain=100)
    build(LESS + 100)
    assert iree.compiled == [(1024, False)]
    with pytest.raises(InfeasibleBudget) as caught:
        build(LESS)
    assert caught.value.least == LESS + 100
    build(caught.value.least)


def test_kernels_run_one_at_a_time_before_anything_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    iree = FakeIree(monkeypatch, scratch=2000, plain=2000, saved=1500)
    build(ALL + 2000)
    report = build(ALL + 500)
    assert iree.compiled == [(2048, False), (2048, False)]
    assert iree.targets == [CPU, CPU.in_order()]
    assert (report["recompute_seconds"], report["plans_refused"]) == (0.0, 1)
    build(LESS + 500)
    assert (iree.compiled[-1], iree.targets[-1]) == ((1024, False), CPU.in_order())


def test_nothing_is_laid_out_that_is_not_asked_for_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    iree = FakeIree(monkeypatch, scratch=100, plain=100)
    builder = BudgetBuilder(JOINT, make_context(), CPU, {}, Progress(), None)
    builder.build(1.0)
    assert iree.laid_out == [CPU]
    builder.build(LESS + 100)
    # What default saves, in order, the curve's end that is as cheap, and the plan that recomputes.
    assert iree.laid_out == [CPU, CPU.in_order()] * 2 + [CPU]
    builder.build(LESS + 100)
    assert len(iree.laid_out) == 5


def test_what_liveness_says_is_far_too_much_is_not_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgeted, "_LEAST", 1)
    iree = FakeIree(monkeypatch)
    build(LESS)
    # What default saves, in order, and of the curve the end that is asked for in any case.
    assert iree.laid_out == [CPU, CPU.in_order(), CPU]


def test_plain_flags_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    iree = FakeIree(monkeypatch, scratch=2000, plain=500)
    build(LESS + 2000)
    assert iree.compiled == [(1024, False)]
    # With plain flags what default saves would fit, but with less memory nothing recomputes less than with more.
    report = build(ALL + 500)
    assert iree.compiled[1:] == [(1024, True)]
    assert report["plans_refused"] >= 1
    build(LESS + 500)
    assert iree.compiled[2:] == [(1024, True)]


@pytest.mark.long_cases("0-0", "100-100")
@pytest.mark.parametrize(("scratch", "plain"), [(0, 0), (100, 100), (2000, 500), (500, 2000)])
def test_more_budget_never_recomputes_more_and_less_never_has_a_higher_peak(
    monkeypatch: pytest.MonkeyPatch, scratch: int, plain: int
) -> None:
    iree = FakeIree(monkeypatch, scratch=scratch, plain=plain)
    least, most = LESS + min(scratch, plain), ALL + max(scratch, plain)
    taken = []
    for step in range(21):
        budget = least + (most - least) * step // 20
        report = build(budget)
        saved, is_plain_one = iree.compiled[-1]
        peak = 2048 + saved + (plain if is_plain_one else scratch)
        assert peak <= budget
        taken.append((peak, -report["recompute_seconds"], -is_plain_one))
    assert [peak for peak, *_ in taken] == sorted(peak for peak, *_ in taken)
    assert [other for _, *other in taken] == sorted(other for _, *other in taken)


def chain(products: int) -> str:
    """A joint function each of whose products is saved, and may go to the host."""
    names = ["x", *(f"a{n}" for n in range(products))]
    lines = [
        f'%{given} = torch.aten.mm %{taken}, %x {{bwd.values = ["{given}"], bwd.offload = "maybe"}} : !w, !w -> !w'
        for taken, given in pairwise(names)
    ]
    lines.append(f"%out = torch.aten.neg %{names[-1]} : !w -> !w")
    tangents = ["t", *(f"g{name}" for name in reversed(names[1:]))]
    lines += [f"%{given} = torch.aten.mm %{taken}, %{given[1:]} : !w, !w -> !w" for taken, given in pairwise(tangents)]
    lines.append(f"return %out, %{tangents[-1]} : !w, !w")
    ports = '(%x: !w {bwd.role = "input", bwd.name = "x"}, %t: !w {bwd.role = "tangent", bwd.name = "t"})'
    given = '(!w {bwd.role = "output", bwd.name = "out"}, !w {bwd.role = "grad", bwd.name = "grad.x"})'
    body = "\n".join(lines)
    return f"!w = !torch.vtensor<[16,16],f32>\nfunc.func @joint{ports} -> {given} {{\n{body}\n}}"


def moving_builder(rate: float) -> BudgetBuilder:
    rates = DeviceRates(rate, rate, 1e11, 1e11)
    return BudgetBuilder(chain(8), make_context(), CPU, {}, Progress(), None, cut_gains=(1, 1), rates=rates)


def test_residuals_go_to_the_host_where_that_takes_less_time_or_nothing_else_fits() -> None:
    slow, fast = (list(moving_builder(rate)._choices(1 << 30)) for rate in (1.0, 1e20))
    # At last, the plan of `default` and that of lowest peak.
    assert [c.may_offload for c in slow] == [False] * (len(slow) - 2) + [True, True]
    assert [c.policy.name for c in slow[-2:]] == ["default", "budget"]
    places = [place for place, choice in enumerate(fast) if choice.may_offload]
    costs = [c.policy.point.cost if isinstance(c.policy, PointOfCurve) else 0.0 for c in fast]
    assert places[-1] == len(fast) - 1
    assert max(costs[: places[0]]) == 0.0 < costs[places[0] + 1]


def test_a_budget_takes_what_goes_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeIree(monkeypatch)
    # It knows of no stages.
    monkeypatch.setattr(budgeted, "unknown_scratch", lambda staged, scratch: [])
    builder = moving_builder(1e20)
    choice = next(c for c in builder._choices(1 << 30) if c.may_offload)
    peak = step_peak(builder._stage_choice(choice), {})
    staged = builder.build(peak)[0]
    assert staged.offloaded == tuple(f"a{n}" for n in range(8))
    assert (staged.partition["recompute_seconds"], staged.memory_budget) == (0.0, peak)
    assert builder.build(1 << 30)[0].offloaded == ()
    # With a slow link the same budget recomputes.
    assert moving_builder(1.0).build(peak)[0].offloaded == ()


def test_few_points_of_a_long_curve_are_tried() -> None:
    peaks = list(range(1000, 0, -1))
    kept = thin_out(peaks, 24)
    assert len(kept) <= 24
    assert (kept[0], kept[-3:]) == (1000, [3, 2, 1])
    steps = [a - b for a, b in pairwise(kept[:-3])]
    assert max(steps) <= 2 * min(steps)
    assert thin_out([9, 5, 4, 1], 24) == [9, 5, 4, 1]
    assert thin_out([9, 5, 4, 1], 2) == [9, 5, 4, 1]


def test_a_compilation_that_takes_more_than_was_said_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    iree = FakeIree(monkeypatch, surprise=10_000)
    build(ALL)
    assert iree.compiled[0] == (2048, False)
    assert iree.compiled[1:] == [(2048, False)] * 3 + [(1024, False)] * 2 + [(1024, True)]


def test_peak_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = BudgetBuilder(JOINT, make_context(), CPU, {}, Progress(), None)
    staged = builder.stage()
    assert step_peak(staged, {}) == ALL
    assert step_peak(staged, {"forward_into": 5000, "backward_into": 7}) == 3072 + 5000
    # Without the two values that are saved.
    assert forward_alone(staged, {"forward_into": 5000, "backward_into": 7}) == 1024 + 5000


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 1), ("int64", 8), ("uint8", 1), ("bool", 1)],
)
def test_bytes_of_a_tensor(dtype: str, size: int) -> None:
    assert port_bytes(TensorSpec("x", "input", ("batch", 5), dtype, "x", (3, 5))) == 15 * size


def test_a_curve_as_text() -> None:
    lines = plot_curve([[4096, 0.0], [2048, 1e-3]], width=8).splitlines()
    assert lines[0].split() == ["0.0e+00", "s", "4.0", "KiB", "#" * 8]
    assert lines[1].split() == ["1.0e-03", "s", "2.0", "KiB", "#" * 4]
    many = plot_curve([[100 - i, float(i)] for i in range(50)])
    assert len(many.splitlines()) <= 9
    assert many.splitlines()[-1].startswith("4.9e+01")
    assert plot_curve([]) == ""


class Guesses(BudgetBuilder):
    """A curve of random peaks, which liveness knows with an error of up to a fifth, in both schedules."""

    peaks: dict[tuple[str, int | None, bool], tuple[int, int]]

    def draw(self, numbers: random.Random) -> None:
        curve = sorted({numbers.randint(300, 1000) for _ in range(8)}, reverse=True)
        planned: dict[tuple[str, int | None, bool], int] = {
            ("default", None, False): curve[0] * 13 // 10,
            ("default", None, True): curve[0],
            **{("budget", peak, True): peak for peak in curve},
            **{("budget", peak, False): int(peak * numbers.uniform(1, 1.3)) for peak in curve},
        }
        peaks = {key: (peak, int(peak * numbers.uniform(0.8, 1.2))) for key, peak in planned.items()}
        points = tuple(Point(peak, float(i), NO_PLAN) for i, peak in enumerate(curve))
        object.__setattr__(self, "_plans", (Curve(points), NO_GRAPH))
        object.__setattr__(self, "peaks", peaks)

    def stage(self, policy: Policy = POLICIES["default"], *, in_order: bool = False, may_offload: bool = False) -> Any:
        assert not may_offload
        point = policy.point if isinstance(policy, PointOfCurve) else None
        planned, laid_out = self.peaks[policy.name, None if point is None else point.peak, in_order]
        place = 0 if point is None else self.curve.points.index(point)
        return Guess({"place": place}, laid_out, planned)

    def scratch(self, staged: Any, target: Target) -> dict[str, int]:
        return {}


@dataclass(frozen=True)
class Guess:
    """What stands for a staged module: its partition, and its peaks as IREE lays them out and by liveness."""

    partition: dict[str, Any]
    peak: int
    planned_peak: int
    memory_budget: int | None = None


def test_more_memory_never_recomputes_more_and_less_never_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far off liveness is: what is tried does not hang on the budget, but on what it says and IREE lays out."""
    monkeypatch.setattr(budgeted, "step_peak", lambda staged, scratch: staged.peak)
    monkeypatch.setattr(budgeted, "forward_alone", lambda *_: 0)
    executable = Executable(b"", (), {}, 0.0)
    monkeypatch.setattr(budgeted, "build_executable", lambda *_, **__: (executable, False))
    numbers = random.Random(0)
    for _ in range(60):
        drawn = Guesses("", None, CPU, {}, Progress(), None)
        drawn.draw(numbers)
        least = None
        found: list[tuple[int, int]] = []
        for budget in sorted({laid_out for _, laid_out in drawn.peaks.values()}, reverse=True):
            try:
                staged: Any = drawn.build(budget)[0]
                assert least is None
                found.append((staged.peak, staged.partition["place"]))
            except InfeasibleBudget as error:
                assert least in (None, error.least)
                least = error.least
                assert drawn.build(least)[0].peak == least  # type: ignore[attr-defined]
        assert all(less[0] <= more[0] and less[1] >= more[1] for more, less in pairwise(found))
