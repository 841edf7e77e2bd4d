# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiling within a memory budget: the plan that liveness proposes is checked against what IREE will allocate.

Liveness only approximates IREE's scratch memory. IREE states it after its stream phase, which takes a fraction of a
compilation. What can be built, a plan with a set of flags, stands in one order whatever the budget: ``default``, the
curve from its cheap end on, and last the plan of lowest peak with plain flags, which make slower code that takes less
scratch memory. The first that fits is taken. So more budget never gives more recomputation, and never plainer flags,
and less never a higher peak: what is taken with less does fit with more, and what stood in front of it there did not.
Bytes of open sizes are those at the sizes of the trace.

Where functions may be cut into stages, between which residuals are freed and gradients allocated, each plan is tried so
too before more is recomputed: if that saves as much as it has to where nobody asks for it, or, of the plans of lowest
peak, as it has to where somebody does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from retrograd.contract.device_rates import DeviceRates
from retrograd.contract.partitions import BUDGET, DEFAULT
from retrograd.dialects import ir
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.memory_size import resolve_memory_size
from retrograd.pipelines.analysis.partition.pareto import Curve, InfeasibleBudget, Point
from retrograd.pipelines.analysis.partition.policies import POLICIES, PointOfCurve, Policy
from retrograd.pipelines.analysis.partition.recompute_cut import CostModel, Device
from retrograd.pipelines.devices.targets import Target
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.stages.lifetimes import shorten_lifetimes
from retrograd.pipelines.stages.offloading import moved_bytes
from retrograd.pipelines.stages.peaks import forward_alone, step_peak, unknown_scratch
from retrograd.pipelines.stages.staged import (
    ExecutableStore,
    Finished,
    Progress,
    StagedModule,
    build_executable,
    executable_parts,
    read_curve,
    stage_module,
)
from retrograd.pipelines.toolchain.executable import measure_scratch
from retrograd.pipelines.toolchain.lowering import lower_to_linalg

# How far liveness, brought to the scale of IREE's peak for `default` in the same schedule, may overestimate a peak:
# with kernels side by side, and with memory laid out for one at a time.
_SLACK, _SLACK_IN_ORDER = 1.2, 1.1
# How far above its peak in stages that of functions in one piece may be.
_SLACK_IN_STAGES = 1.6
# As many points of lowest peak are tried whatever liveness says of them: any may have the least peak.
_LEAST = 3
# As many points of the curve are tried at most, evenly spread by peak.
_MOST = 24
# What tells a choice from others: policy, its budget, target, the bytes that cutting has to save, and whether residuals
# go to the host.
Key = tuple[str, str | None, Target, int | None, bool]
_DEFAULT = POLICIES[DEFAULT]


@dataclass(frozen=True)
class Choice:
    """One way to build: a policy, a target with its flags, facts for the report, and, for functions in stages, how many
    bytes that has to save."""

    policy: Policy
    target: Target
    facts: dict[str, Any]
    # Whether IREE is asked whatever liveness says.
    always: bool = False
    cut_gain: int | None = None
    # Whether residuals go to the host that may.
    may_offload: bool = False

    @property
    def key(self) -> Key:
        """Identify the choice."""
        return self.policy.name, self.policy.budget, self.target, self.cut_gain, self.may_offload

    @property
    def point(self) -> int | None:
        """The peak of its plan on the curve, by liveness, if it is one of these."""
        return self.policy.point.peak if isinstance(self.policy, PointOfCurve) else None


@dataclass(frozen=True)
class BudgetBuilder:
    """Builds an imported module, given as text with locations, within a budget; ``standalone`` is as for
    :func:`build_executable`. ``cut_gains`` are the bytes that it has to save to cut functions into stages: those of any
    plan, and of the plans of lowest peak; none where functions stay whole. ``rates`` are those of the device where
    residuals may go to its host."""

    source: str
    context: ir.Context
    target: Target
    versions: dict[str, str]
    progress: Progress
    store: ExecutableStore | None
    standalone: bool = True
    cut_gains: tuple[int, int] | None = None
    rates: DeviceRates | None = None
    # What was worked out already: by module and target, its scratch memory; by schedule, and whether residuals go to
    # the host, what ``default`` makes.
    laid_out: dict[tuple[str, Target], dict[str, int]] = field(default_factory=dict, compare=False)
    defaults: dict[tuple[bool, bool], StagedModule] = field(default_factory=dict, compare=False)
    # Peaks of choices, by liveness.
    planned: dict[Key, int] = field(default_factory=dict, compare=False)
    # What their forwards take, whatever they save.
    forwards: dict[Key, int] = field(default_factory=dict, compare=False)

    def build(self, budget: int | float, eager_peak: int | None = None) -> Finished:
        """The cheapest of the curve's plans whose peak is at most ``budget``: bytes, or (float) a fraction of
        ``eager_peak``, the bytes that a step takes in eager; where these are not known, of the peak of ``default``.
        Also returns whether the executable was in the store.

        Raises:
            InfeasibleBudget: no plan stays within it; says the least peak that one has.
            PipelineError, CompileError: the module cannot be compiled.
        """
        whole = self._weigh_default(self.target)[0] if eager_peak is None else eager_peak
        limit = resolve_memory_size(budget, whole)
        facts = {"memory_budget": limit, "eager_peak_bytes": eager_peak, "pareto": self.curve.table()}
        refused: dict[Key, int] = {}
        for choice in self._choices(limit):
            built, peak = self.attempt(choice, limit, {**facts, "plans_refused": len(refused)})
            if built is not None:
                return built
            if peak is not None:
                refused[choice.key] = peak
        least, key = self._find_least(refused)
        raise InfeasibleBudget(limit, least, eager_peak, self._explain_least(least, self.forwards.get(key, 0), limit))

    def _find_least(self, refused: Mapping[Key, int]) -> tuple[int, Key]:
        """The least budget that can be kept, given the peaks of what was refused, and by what: more is tried with more,
        and may have a lower one."""
        key = min(refused, key=lambda one: refused[one])
        least = enough = refused[key]
        for choice in self._choices(enough):
            peak = refused[choice.key] if choice.key in refused else self._weigh(choice, enough)[1]
            if peak is not None and peak < least:
                least, key = peak, choice.key
        return least, key

    def _explain_least(self, least: int, forward: int, limit: int) -> str:
        """Why no plan stays within ``limit`` bytes, where one half alone takes more, whatever is saved."""
        # By liveness, which knows nothing of buffers in what is dead.
        backward = min(self.curve.held, least)
        if max(backward, forward) <= limit:
            return ""
        if forward > backward:
            return f"whatever is saved, its forward takes {forward} bytes"
        return f"whatever is saved, its backward holds {backward} bytes where it holds most"

    def _choices(self, limit: int) -> Iterator[Choice]:
        """Yield what to try, in order; of the curve's points those that may be within ``limit``, and the lowest in any
        case: any of these may have the least peak.

        Each is tried as IREE schedules it and with memory laid out for kernels one at a time, before more is
        recomputed: that costs next to nothing. Which of both takes less memory depends: kernels side by side need
        theirs together, but IREE lets them run as late as they can. Then it is tried in stages.
        """
        free = {"policy": BUDGET, "recompute_seconds": 0.0, "recompute_seconds_gap": 0.0}
        ordered = self.target.in_order()
        yield from self._ways(_DEFAULT, free, always=False)
        points = {point.peak: point for point in self.curve.points}
        peaks, slack = list(points), _SLACK if self.cut_gains is None else _SLACK_IN_STAGES
        moves = None if self.rates is None else self._offloading(_DEFAULT, free)
        for peak in thin_out(peaks, _MOST):
            if moves is not None and self._recompute_seconds(points[peak]) > self._move_seconds:
                yield moves
                moves = None
            always = peak in peaks[-_LEAST:]
            if always or self._may_fit(peak, limit, slack):
                yield from self._ways(self.policy(points[peak]), {}, always)
        plain = replace(ordered, ladder=ordered.ladder[-1:])
        if plain != ordered:
            yield Choice(self.policy(points[peaks[-1]]), plain, {}, always=True)
        if moves is not None:
            yield moves
        if self.rates is not None:
            yield self._offloading(self.policy(points[peaks[-1]]), {})

    def _offloading(self, policy: Policy, facts: dict[str, Any]) -> Choice:
        """A plan whose residuals go to the host; in stages, which none of them outlives that is done."""
        gain = None if self.cut_gains is None else 1
        return Choice(policy, self.target, facts, always=True, cut_gain=gain, may_offload=True)

    @cached_property
    def _move_seconds(self) -> float:
        """How long it takes to move the residuals of ``default`` that may go to the host."""
        moved = sum(moved_bytes(self.stage(may_offload=True)).values())
        return math.inf if self.rates is None else self.rates.move_seconds(moved)

    def _recompute_seconds(self, point: Point) -> float:
        """How long it takes the device to recompute what a plan does."""
        if self.rates is None:
            return point.cost
        costs = CostModel(Device(self.rates.flops, self.rates.memory))
        return costs.total(self._plans[1], point.plan.recomputed)

    def _ways(self, policy: Policy, facts: dict[str, Any], always: bool) -> Iterator[Choice]:
        """Yield the ways to build one plan, those that cost less time first."""
        yield Choice(policy, self.target, facts, always)
        yield Choice(policy, self.target.in_order(), facts, always)
        if self.cut_gains is not None:
            gain = self.cut_gains[always]
            # Cuts cannot save more than there is.
            if self.stage().planned_peak > gain:
                yield Choice(policy, self.target, facts, always, gain)

    @cached_property
    def _plans(self) -> tuple[Curve, JointGraph]:
        with self.context, ir.Location.unknown():
            return read_curve(ir.Module.parse(self.source))

    @property
    def curve(self) -> Curve:
        """The plans that liveness proposes."""
        return self._plans[0]

    def policy(self, point: Point) -> Policy:
        """The policy that a point of the curve is."""
        return PointOfCurve(point, *self._plans)

    @cached_property
    def _scale(self) -> float:
        """Peaks as IREE lays them out, of what liveness says: that of ``default``, in the schedule that has the lower
        one, as the curve's peaks are."""
        laid_out, planned = zip(*map(self._weigh_default, (self.target, self.target.in_order())), strict=True)
        return float(min(laid_out) / max(1, min(planned)))

    def _may_fit(self, planned: int, limit: int, slack: float) -> bool:
        """Whether the plan of this peak on the curve may be within ``limit`` bytes, in whichever schedule."""
        return planned <= limit * slack / self._scale

    def _is_hopeless(self, choice: Choice, planned: int, limit: int) -> bool:
        """Whether a choice will not be within ``limit``, by the peak that liveness says its schedule has."""
        if choice.always or choice.point is None:
            return False
        if choice.cut_gain is not None:
            # What is planned is for functions in one piece.
            return not self._may_fit(choice.point, limit, _SLACK_IN_STAGES)
        laid_out, reference = self._weigh_default(self.target.in_order() if choice.target.is_in_order else self.target)
        slack = _SLACK_IN_ORDER if choice.target.is_in_order else _SLACK
        return planned * laid_out > limit * slack * max(1, reference) or not self._may_fit(choice.point, limit, _SLACK)

    def _weigh_default(self, target: Target) -> tuple[int, int]:
        """The peak of ``default`` as IREE lays it out, and as planned."""
        choice = Choice(_DEFAULT, target, {})
        default = self._stage_choice(choice)
        peak = step_peak(default, self.scratch(default, target))
        return peak, default.planned_peak

    def attempt(self, choice: Choice, limit: int, facts: dict[str, Any]) -> tuple[Finished | None, int | None]:
        """Build a choice, unless its peak, which is returned as well, is above ``limit``; None where that was clear
        before it was known."""
        staged, peak = self._weigh(choice, limit)
        if staged is None or peak is None or peak > limit:
            return None, peak
        executable, cached = build_executable(
            staged, choice.target, self.versions, self.progress, self.store, standalone=self.standalone
        )
        # That may have taken other flags than those that were asked.
        peak = step_peak(staged, executable.working)
        if peak > limit:
            return None, peak
        said = {**staged.partition, **facts, **choice.facts}
        return (replace(staged, partition=said, memory_budget=limit), executable, cached), peak

    def _weigh(self, choice: Choice, limit: int) -> tuple[StagedModule | None, int | None]:
        """Stage a choice, and measure its peak as IREE lays it out; None where it is hopeless.

        So is what has a lower peak than liveness lets it have at all: with just that much it would not be tried, and
        whether a choice is one must not depend on the budget.
        """
        if choice.key in self.planned and self._is_hopeless(choice, self.planned[choice.key], limit):
            return None, None
        staged = self._stage_choice(choice)
        # Then it is one that was tried before.
        if (choice.cut_gain is not None and staged.whole is None) if not choice.may_offload else not staged.offloaded:
            return None, None
        planned = self.planned[choice.key] = staged.planned_peak
        if self._is_hopeless(choice, planned, limit):
            return None, None
        scratch = self.scratch(staged, choice.target)
        peak = step_peak(staged, scratch)
        self.forwards[choice.key] = forward_alone(staged, scratch)
        return (None, None) if self._is_hopeless(choice, planned, peak) else (staged, peak)

    def _stage_choice(self, choice: Choice) -> StagedModule:
        staged = self.stage(choice.policy, in_order=choice.target.is_in_order, may_offload=choice.may_offload)
        return staged if choice.cut_gain is None or staged.plans else shorten_lifetimes(staged, choice.cut_gain)

    def stage(self, policy: Policy = _DEFAULT, *, in_order: bool = False, may_offload: bool = False) -> StagedModule:
        """The module through all stages up to ``scheduled``, by a policy; ``in_order`` is for kernels that run one at a
        time, ``may_offload`` for residuals that go to the host.

        Raises:
            PipelineError: a pass refused the module.
        """
        known = in_order, may_offload
        if policy == _DEFAULT and known in self.defaults:
            return self.defaults[known]
        with self.context, ir.Location.unknown():
            module = ir.Module.parse(self.source)
            staged = stage_module(module, policy, self.progress, in_order=in_order, may_offload=may_offload)
        if policy == _DEFAULT:
            self.defaults[known] = staged
        return staged

    def scratch(self, staged: StagedModule, target: Target) -> dict[str, int]:
        """Scratch bytes of each function, worked out once, or from the store where they are known."""
        key = (staged.texts["scheduled"], target)
        if key not in self.laid_out:
            self.laid_out[key] = self._lay_out(staged, target)
        return self.laid_out[key]

    def _lay_out(self, staged: StagedModule, target: Target) -> dict[str, int]:
        parts = {"kind": "scratch", **executable_parts(staged, target, self.versions, standalone=self.standalone)}
        found = self.store.get(parts) if self.store is not None else None
        if found is not None:
            return {str(name): int(size) for name, size in json.loads(found).items()}
        with self.progress.phase("measure memory"):
            linalg = lower_to_linalg(staged.source.encode(), target, twins_alone=True, donating=not self.standalone)
            scratch = measure_scratch(linalg, target)
        if unknown := unknown_scratch(staged, scratch):
            what = f"the scratch memory of @{unknown[0]} depends on more than the sizes of its arguments"
            raise CompileError("iree-compile", f"{what}: no budget can be kept; leave out partition='budget'", "", "")
        if self.store is not None:
            self.store.put(parts, json.dumps(scratch).encode())
        return scratch


def thin_out(peaks: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of falling ``peaks``, evenly spread: the ends, and those at the least distance between that
    leaves so few; the lowest ``_LEAST`` are kept in any case."""
    kept = list(peaks)
    gap = 0.0
    while len(kept) > max(most, _LEAST + 1):
        gap = max(1.0, gap * 1.2, (peaks[0] - peaks[-1]) / (2 * most))
        kept = [peaks[0]]
        for peak in peaks[1:-_LEAST]:
            if kept[-1] - peak >= gap:
                kept.append(peak)
        kept += peaks[-_LEAST:]
    return kept
