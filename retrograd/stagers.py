# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Stages and finishes what is built: graphs of two kinds, ahead of time and as they ran, and backwards that leave out
outputs of one. How each is staged and finished."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from typing import Protocol

import torch

from retrograd.contract.device_rates import ASSUMED_RATES, DeviceRates
from retrograd.contract.manifest import PACKAGES
from retrograd.contract.partitions import BUDGET, DEFAULT
from retrograd.contract.plan import StagePlan
from retrograd.contract.roles import BACKWARD, INTO, JOINT
from retrograd.dialects import ir
from retrograd.frontend.doors.captured_graph import Captured
from retrograd.frontend.islands.island_choice import Island
from retrograd.frontend.preparation.importer import import_graph
from retrograd.options import Options
from retrograd.pipelines.analysis.partition.read_graph import read_hints
from retrograd.pipelines.devices.targets import Target
from retrograd.pipelines.infra.functions import find_function
from retrograd.pipelines.stages.backward_variants import stage_variant, variant_peak
from retrograd.pipelines.stages.budgeted import BudgetBuilder
from retrograd.pipelines.stages.collective_passes import request_collectives
from retrograd.pipelines.stages.kept_stages import KeptStages, Staging
from retrograd.pipelines.stages.lifetimes import shorten_lifetimes
from retrograd.pipelines.stages.peaks import forward_peak
from retrograd.pipelines.stages.staged import (
    ExecutableStore,
    Finished,
    Progress,
    StagedModule,
    build_executable,
    executable_parts,
    mark_module,
    stage_backward,
)
from retrograd.pipelines.toolchain.executable import Executable
from retrograd.runtime.cuda.residual_moves import mover_of
from retrograd.tuning import tune


class Stager(Protocol):
    """How one kind of what is built is staged and finished; ``plan`` is the plan of one that has calls of Python."""

    plan: StagePlan | None

    def stage(self, islands: Sequence[Island]) -> StagedModule:
        """Run the passes of all stages on the graph, with these islands.

        Raises:
            CaptureError, PipelineError: it cannot be.
        """

    def finish(self, staged: StagedModule) -> Finished:
        """Lower and compile what was staged.

        Raises:
            CompileError, InfeasibleBudget, OverBudget: it cannot be.
        """


@cache
def _releases() -> tuple[tuple[str, str], ...]:
    """The releases of the packages, read once: to read them for each compilation took a hundredth of a small one's own
    time, and what is imported stays what it is."""
    return tuple((key, version(package)) for key, package in PACKAGES.items())


@dataclass
class Work:
    """One compilation: what is compiled, how, and what it goes through on the way."""

    captured: Captured
    options: Options
    phases: Progress
    store: ExecutableStore | None
    portable: bool = False
    # Where one output is a loss, its backward is compiled at once, and that of all outputs when it is first used.
    for_loss: bool = False

    @property
    def cut_gain(self) -> int | None:
        """Bytes that it has to save to cut functions into stages, if they may be cut: a file has whole ones, for others
        than the runtime to call."""
        return None if self.portable else self.options.cut_gain

    @cached_property
    def rates(self) -> DeviceRates:
        """How fast the device is, measured once; of one that is not here what is assumed."""
        device = self.options.device
        if device.type != "cuda":
            return ASSUMED_RATES
        known = {"entry": "rates", "device": torch.cuda.get_device_name(device)}
        found = self.store.get(known) if self.store is not None else None
        if found is not None:
            return DeviceRates(**json.loads(found))
        with self.phases.phase("measure device"):
            rates = mover_of(device).measure()
        if self.store is not None:
            self.store.put(known, json.dumps(asdict(rates)).encode())
        return rates

    @property
    def versions(self) -> dict[str, str]:
        """The releases of what it is made with."""
        return dict(_releases())

    def compile(self, staged: StagedModule, target: Target | None = None) -> Finished:
        """Lower and compile a staged module for a target, that of the options if there is no other."""
        executable, cached = build_executable(
            staged,
            self.tuned(staged, target or self.options.target),
            self.versions,
            self.phases,
            self.store,
            standalone=self.portable,
        )
        return staged, executable, cached

    def place_of_code(self, staged: StagedModule) -> dict[str, str]:
        """The key that the executable of a staged module is kept under."""
        target = self.tuned(staged, self.options.target)
        return executable_parts(staged, target, self.versions, standalone=self.portable and not staged.plans)

    def tuned(self, staged: StagedModule, target: Target) -> Target:
        """A target with the tiles that are asked for, for the kernels of a module."""
        tuning = self.options.tuning
        return target if tuning is None else tune(staged, target, tuning, self.phases, self.store)


@dataclass
class AheadOfTime:
    """A joint graph, which is partitioned, by a policy or within a budget; or one function by itself."""

    work: Work
    plan: StagePlan | None = None
    _builder: BudgetBuilder | None = None
    # Where what is staged is to be kept; none if it is from there.
    _kept: KeptStages | None = None

    def stage(self, islands: Sequence[Island]) -> StagedModule:
        work = self.work
        module = import_captured(work.captured, work.options, work.phases, islands)
        if find_function(module.operation, JOINT) is None:
            # A forward alone has nothing to partition, whatever the policy.
            return self._stage_once(module, DEFAULT)
        if work.options.partition != BUDGET:
            return self._stage_once(module, work.options.partition)
        source, target = module.operation.get_asm(enable_debug_info=True), work.options.target
        self._builder = BudgetBuilder(
            source,
            module.context,
            target,
            work.versions,
            work.phases,
            work.store,
            standalone=work.portable,
            cut_gains=None if work.portable else work.options.budget_cut_gains,
            rates=work.rates if work.options.policy.may_offload and not work.portable else None,
        )
        return self._builder.stage()

    def finish(self, staged: StagedModule) -> Finished:
        work = self.work
        if self._builder is None or work.options.budget is None:
            work.captured.packings.check_saved(staged.saved)
            finished = work.compile(staged)
            if self._kept is not None:
                self._kept.put(staged)
            return finished
        # Other plans have the same kernels, some of them more often.
        builder = replace(self._builder, target=work.tuned(staged, self._builder.target))
        built = builder.build(work.options.budget, work.captured.eager_peak)
        work.captured.packings.check_saved(built[0].saved)
        return built

    def _stage_once(self, module: ir.Module, policy: str) -> StagedModule:
        """Returns what is compiled at once of a module; kept stages are those of a compilation that succeeded."""
        work = self.work
        # A file holds the backward of all outputs, and on Vulkan a program finds its own residuals alone.
        for_loss = work.for_loss and not work.portable and {"cpu", "cuda"}.issuperset(work.options.target.kinds)
        staging = Staging(policy, for_loss, work.cut_gain)
        kept = KeptStages.of(work.store, module, staging, work.versions)
        found = kept.get(work.phases)
        self._kept = kept if found is None else None
        return staging.stage(module, work.phases) if found is None else found


@dataclass
class AsItRan:
    """A backward with hooks, which is cut into stages; ``seen`` is called with the text of the imported module, before
    any pass has run, and may raise."""

    work: Work
    seen: Callable[[str], None]
    plan: StagePlan | None = None

    def stage(self, islands: Sequence[Island]) -> StagedModule:
        captured, options = self.work.captured, self.work.options
        module = import_captured(captured, options, self.work.phases, islands)
        if not islands:
            # Of an island the text has only what it takes and gives.
            self.seen(f"{module}{captured.communication}{captured.in_order}")
        schedule = "eager-order" if captured.in_order else options.hook_schedule
        staged = stage_backward(module, schedule, self.work.phases, captured.communication)
        self.plan = staged.plan
        return staged.module

    def finish(self, staged: StagedModule) -> Finished:
        return self.work.compile(staged)


class OverBudget(Exception):
    """Raised where nothing that was tried of a variant stays within the memory budget of its step."""


@dataclass
class WithoutTangents:
    """The backward of a step that was built, ``step`` to ``executable``, without the tangents ``absent`` of the outputs
    that a loss leaves out. The forward, and what it saves, are there."""

    work: Work
    step: StagedModule
    executable: Executable
    absent: Collection[str]
    plan: StagePlan | None = None

    def stage(self, islands: Sequence[Island] = ()) -> StagedModule:
        """Stage a variant; its islands were settled with the step."""
        are_joined = BACKWARD + INTO in self.executable.joined
        staged = stage_variant(self.step.whole or self.step, self.absent, self.work.phases, are_joined=are_joined)
        gain = self.work.cut_gain
        if self.step.memory_budget is not None and self.step.whole is not None:
            # The step keeps its budget in stages.
            gain = 1
        if gain is None:
            return staged
        forward = forward_peak(self.step, self.executable.working)
        return shorten_lifetimes(staged, gain, forward)

    def finish(self, staged: StagedModule) -> Finished:
        limit = self.step.memory_budget
        for target in self._targets():
            finished = self.work.compile(staged, target)
            working = {**self.executable.working, **finished[1].working}
            if limit is None or variant_peak(self.step, staged, working) <= limit:
                return finished
        raise OverBudget

    def _targets(self) -> Iterator[Target]:
        """The targets to compile for: with a budget, also for kernels one at a time, and then with plain flags."""
        target = self.work.options.target
        yield target
        if self.step.memory_budget is not None:
            yield target.in_order()
            yield replace(target.in_order(), ladder=target.in_order().ladder[-1:])


def import_captured(
    captured: Captured, options: Options, phases: Progress, islands: Sequence[Island] = ()
) -> ir.Module:
    """A captured graph on MLIR, with the ops marked that the rules on what to save are about.

    Raises:
        CaptureError: an op that cannot be imported.
        PipelineError: a rule contradicts the model or matches nothing.
        ValueError: a budget for a part of a model, of open sizes.
    """
    with phases.phase("import"):
        module = import_graph(
            captured.graph_module,
            captured.signature,
            function=captured.function,
            bodies=captured.bodies,
            islands=islands,
        )
    if captured.is_part and options.partition == BUDGET and read_hints(module.operation):
        # Of open sizes a budget holds at those of the trace, which here are those of whichever call came first.
        raise ValueError("partition='budget' keeps a peak, which differs from size to size; compile for fixed sizes")
    request_collectives(module, options.collectives)
    # Of several graphs that a model breaks into, a rule may be about one.
    mark_module(module, options.policy, unmatched="ignore" if captured.is_part else "error")
    return module
