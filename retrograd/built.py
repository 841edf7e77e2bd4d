# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Defines the result of a build: a loaded program, and how its functions are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from retrograd.active_scopes import is_enabled
from retrograd.contract.moves import Mover
from retrograd.contract.plan import RunStage, StagePlan, whole_plan
from retrograd.contract.roles import INTO, SAVED
from retrograd.contract.tensors import FunctionSpec
from retrograd.first_calls import Checks
from retrograd.frontend.doors.graph_calls import Check, CompiledFunction
from retrograd.frontend.doors.moved_residuals import Moves
from retrograd.frontend.preparation.narrowing import Packer, narrow_packer
from retrograd.pipelines.kernels.choice import AUTO
from retrograd.pipelines.stages.offloading import moving_plans
from retrograd.pipelines.stages.staged import Finished, StagedModule
from retrograd.pipelines.toolchain.executable import Executable
from retrograd.runtime.cuda.captured_calls import CapturedCall, CudaRecorder
from retrograd.runtime.cuda.host_share import CudaClock, HostShare
from retrograd.runtime.cuda.residual_moves import mover_of
from retrograd.runtime.programs.executor import Program
from retrograd.runtime.reports.peak import Half
from retrograd.runtime.steps.compiled import Portable
from retrograd.runtime.steps.islands import IslandTimes
from retrograd.runtime.steps.step_calls import StepCalls
from retrograd.stagers import Work


@dataclass(frozen=True)
class Build:
    """A module that went all the way: its stages, executable and loaded program; what of it runs in torch.

    ``work`` is the compilation that it is of. ``plan`` is that of a backward that was captured as it ran. ``captured``
    are the functions that are replayed as CUDA graphs, by name.
    """

    work: Work
    staged: StagedModule
    executable: Executable
    program: Program
    specs: dict[str, FunctionSpec]
    cached: bool
    times: IslandTimes
    compile_portable: Callable[[], Portable]
    checks: Checks | None = None
    plan: StagePlan | None = None
    captured: list[tuple[str, CapturedCall]] = field(default_factory=list)

    def function(self, name: str) -> CompiledFunction:
        """One function of it, on the names that the frontend knows values by."""
        interface = self.staged.function(name)
        return CompiledFunction(
            arguments=tuple(a.value for a in interface.arguments),
            results=tuple(r.value for r in interface.results),
            copied=frozenset(r.value for r in interface.results if r.role == SAVED),
            call=self._call(name),
            merged=self.staged.merged,
            narrowed=self.packers(self.staged),
            device=self.program.torch_device,
            check=self._check(name),
            moves=self._moves(name),
        )

    def with_part(self, part: Finished) -> Build:
        """The same with a program of its own for a part of it, on the same device."""
        staged, executable, cached = part
        program = Program.load(executable.vmfb, driver=self.program.driver)
        specs = function_specs(staged, executable)
        return replace(self, staged=staged, executable=executable, program=program, specs=specs, cached=cached)

    def cut_halves(self) -> dict[str, Half]:
        """The halves that are cut into stages, or keep residuals on the host, by name."""
        stages = [self.specs[function.name] for function in self.staged.stages]
        plans = {**self.staged.plans, **moving_plans(self.staged)}
        return {name: Half(self.specs[name], plan, stages) for name, plan in plans.items()}

    def mover(self) -> Mover[torch.Tensor] | None:
        """The mover of the residuals that go to the host; None where none do."""
        return mover_of(self.program.torch_device) if moving_plans(self.staged) else None

    def packers(self, staged: StagedModule) -> dict[str, Packer]:
        """How values are packed that are not saved as they are, by name."""
        return {value: self._packer(how) for value, how in staged.narrowed.items()}

    def _check(self, name: str) -> Check | None:
        # Where residuals stay on the device, torch cannot read what a forward gives.
        if self.checks is None or self.program.is_staged:
            return None
        return self.checks.check_of(name, self.program.torch_device, self.staged, self.executable)

    def _packer(self, how: str) -> Packer:
        traced = self.work.captured.packings.traced
        return traced[how].packer() if how in traced else narrow_packer(how)

    def _call(self, name: str) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        call, interface = self._plain_call(name), self.specs.get(name) or self.staged.function(name)
        if not self.work.options.cuda_graphs or not self._is_queued(name) or interface.is_dynamic:
            return call
        device = self.program.torch_device
        host_share = HostShare(CudaClock(device)) if self.work.options.cuda_graphs == AUTO else None
        captured = CapturedCall(call, interface, CudaRecorder(device), host_share)
        self.captured.append((name, captured))
        return captured

    def _moves(self, name: str) -> Moves | None:
        """How a half is called by which residuals go to the host; None where none do."""
        plan = moving_plans(self.staged).get(name)
        if plan is None:
            return None
        mover = mover_of(self.program.torch_device)
        call = self._step_calls.call_of(name, plan, mover)
        return Moves(frozenset(self.staged.offloaded), mover, self._may_move, call)

    def _may_move(self) -> bool:
        """Whether nobody looks at residuals in torch: a first call that is compared, or a backward that is captured."""
        return (self.checks is None or self.checks.are_settled()) and not is_enabled()

    def _is_queued(self, name: str) -> bool:
        """Whether a call of a function waits for nothing."""
        plan = self.staged.plans.get(name) or whole_plan(self.staged.function(name))
        stages = [step.function for step in plan.steps if isinstance(step, RunStage)]
        if plan.has_collectives:
            return False
        return all(island.is_library for island in self.times.islands) and self.program.queues(stages)

    def _plain_call(self, name: str) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        return self._step_calls.call_of(name)

    @property
    def _step_calls(self) -> StepCalls:
        staged = self.staged
        functions = {f.name: f for f in staged.functions} | self.specs
        return StepCalls(self.program, functions, staged.plans, staged.stages, self.times)


def function_specs(staged: StagedModule, executable: Executable) -> dict[str, FunctionSpec]:
    """The functions to call, and those that they were cut into where something runs in torch."""
    functions = {f.name: f for f in (*staged.functions, *staged.stages)}.values()
    return {f.name: replace(f, transient_bytes=_scratch(f.name, staged, executable)) for f in functions}


def _scratch(name: str, staged: StagedModule, executable: Executable) -> int:
    """Scratch bytes of a function; of one that was cut, the most that a stage of it takes."""
    stages = staged.plans[name].stages if name in staged.plans else (name,)
    return max((executable.transients.get(stage + INTO, 0) for stage in stages), default=0)
