# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How the functions of a loaded program are called: whole, or in stages with islands in between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from retrograd.contract.moves import Mover
from retrograd.contract.plan import RunIsland, StagePlan, StartCollective, whole_plan
from retrograd.contract.roles import BACKWARD, FORWARD, OUTPUT, SAVED
from retrograd.contract.tensors import FunctionSpec
from retrograd.runtime.programs.executor import Program
from retrograd.runtime.steps.bound_function import BoundFunction
from retrograd.runtime.steps.islands import IslandTimes
from retrograd.runtime.steps.stage_executor import StageExecutor


@dataclass(frozen=True)
class StepCalls:
    """``functions`` are those of a program by name, ``plans`` say of what stages and islands those consist that were
    cut, and ``stages`` are the functions that were made of them; ``times`` has the islands."""

    program: Program
    functions: Mapping[str, FunctionSpec]
    plans: Mapping[str, StagePlan]
    stages: Sequence[FunctionSpec]
    times: IslandTimes

    def call_of(
        self, name: str, moving: StagePlan | None = None, mover: Mover[torch.Tensor] | None = None
    ) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        """Makes the callable of one function; by the plan ``moving``, with ``mover``, one that keeps residuals on the
        host."""
        if not self.times.islands and name not in self.plans and moving is None:
            after = self.functions.get(BACKWARD) if name == FORWARD and BACKWARD not in self.plans else None
            return BoundFunction(self.program, self.functions[name], same_step=name == BACKWARD, after=after)
        plan = moving or self.plans.get(name) or whole_plan(self.functions[name])
        taken = {
            v
            for p in self.plans.values()
            for s in p.steps
            if isinstance(s, RunIsland | StartCollective)
            for v in s.arguments
        }
        stages = [_within_reach(f, taken) for f in self.stages]
        executor = StageExecutor(plan, self.program, stages, self.times.islands, mover)
        return self.times.timed(executor.run) if self.times.islands else executor.run


def _within_reach(interface: FunctionSpec, taken: Collection[str]) -> FunctionSpec:
    """A function whose results of these names torch can read: residuals may stay where it cannot, in the memory of a
    device."""
    results = tuple(replace(r, role=OUTPUT) if r.role == SAVED and r.value in taken else r for r in interface.results)
    return replace(interface, results=results)
