# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The two kinds of graphs that are built, ahead of time and as they ran: how each is staged and finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from retrograd.contract.plan import StagePlan
from retrograd.contract.roles import JOINT
from retrograd.description import find_versions
from retrograd.dialects import ir
from retrograd.frontend.doors.captured_graph import Captured
from retrograd.frontend.islands.island_choice import Island
from retrograd.frontend.preparation.importer import import_graph
from retrograd.options import Options
from retrograd.pipelines.analysis.partition.policies import BUDGET
from retrograd.pipelines.analysis.partition.read_graph import read_hints
from retrograd.pipelines.infra.functions import find_function
from retrograd.pipelines.stages.backward_variants import find_left_out, stage_first
from retrograd.pipelines.stages.budgeted import BudgetBuilder
from retrograd.pipelines.stages.lifetimes import shorten_lifetimes
from retrograd.pipelines.stages.staged import (
    ExecutableStore,
    Progress,
    StagedModule,
    build_executable,
    mark_module,
    stage_backward,
    stage_module,
)
from retrograd.pipelines.toolchain.executable import Executable

# A module that was compiled, what to, and whether that was in the store.
Finished = tuple[StagedModule, Executable, bool]


class Stager(Protocol):
    """How a kind of graph is staged and finished; ``plan`` is the plan of one that has calls of Python."""

    plan: StagePlan | None

    def stage(self, islands: Sequence[Island]) -> StagedModule:
        """The graph through the passes of all stages, with these islands."""

    def finish(self, staged: StagedModule) -> Finished:
        """Lowered and compiled."""


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

    def compile(self, staged: StagedModule) -> Finished:
        """Lower and compile a staged module for the target."""
        options = self.options
        executable, cached = build_executable(
            staged, options.target, find_versions(), self.phases, self.store, standalone=self.portable
        )
        return staged, executable, cached


@dataclass
class AheadOfTime:
    """A joint graph, which is partitioned, by a policy or within a budget; or one function by itself."""

    work: Work
    plan: StagePlan | None = None
    _builder: BudgetBuilder | None = None

    def stage(self, islands: Sequence[Island]) -> StagedModule:
        work = self.work
        module = import_captured(work.captured, work.options, work.phases, islands)
        if find_function(module.operation, JOINT) is None:
            # A forward alone has nothing to partition, whatever the policy.
            return stage_module(module, "default", work.phases)
        if work.options.partition != BUDGET:
            return stage_module(module, work.options.partition, work.phases)
        source, target = module.operation.get_asm(enable_debug_info=True), work.options.target
        self._builder = BudgetBuilder(
            source, module.context, target, find_versions(), work.phases, work.store, work.portable
        )
        return self._builder.stage()

    def finish(self, staged: StagedModule) -> Finished:
        work = self.work
        if self._builder is None or work.options.budget is None:
            work.captured.packings.check_saved(staged.saved)
            first = self._first(staged)
            return work.compile(first if work.cut_gain is None else shorten_lifetimes(first, work.cut_gain))
        built = self._builder.build(work.options.budget)
        work.captured.packings.check_saved(built[0].saved)
        return built

    def _first(self, staged: StagedModule) -> StagedModule:
        """Returns what is compiled at once: the backward of the loss, where one output is one. A file holds that of all
        outputs, and on Vulkan a program finds its own residuals alone."""
        work = self.work
        if not work.for_loss or work.portable or not {"cpu", "cuda"}.issuperset(work.options.target.kinds):
            return staged
        absent = find_left_out(staged)
        return stage_first(staged, absent, work.phases) if absent else staged


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
            self.seen(f"{module}{captured.communication}")
        staged = stage_backward(module, options.hook_schedule, self.work.phases, captured.communication)
        self.plan = staged.plan
        return staged.module

    def finish(self, staged: StagedModule) -> Finished:
        return self.work.compile(staged)


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
    # Of several graphs that a model breaks into, a rule may be about one.
    mark_module(module, options.policy, unmatched="ignore" if captured.is_part else "error")
    return module
