# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Backwards that are one function of small tensors, and accumulations of what it gives: called with no more than where
the arguments begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from retrograd.contract.plan import AccumulateGrad, FinalCallbacks, Free, RunStage, StagePlan
from retrograd.runtime.steps.bound_function import BoundFunction, ShortCall


@dataclass(frozen=True)
class ShortPlan:
    """``call`` runs the function on the arguments of the plan at the places ``taken``. Of its results, by number, are
    accumulated those that ``accumulations`` says, each into which parameter and whether nobody else has it; and those
    in ``results`` are the plan's."""

    call: ShortCall
    taken: tuple[int, ...]
    accumulations: tuple[tuple[int, int, bool], ...]
    results: tuple[int, ...]

    def takes(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether the arguments of the plan are of the form that it is called with so."""
        return self.call.takes([arguments[place] for place in self.taken])


def find_short_plan(plan: StagePlan, function: BoundFunction, owned: Sequence[bool | None]) -> ShortPlan | None:
    """The short way to run a plan of one ``function``; None where there is none, or not yet. ``owned`` says of each
    accumulation whether it has its gradient for itself, None where only a run tells."""
    call = function.short_call()
    (stage,) = [step for step in plan.steps if isinstance(step, RunStage)]
    numbers = {name: number for number, name in enumerate(stage.results)}
    accumulated = [step for step in plan.steps if isinstance(step, AccumulateGrad)]
    given = [*[step.gradient for step in accumulated], *plan.results]
    if call is None or None in owned or not numbers.keys() >= {*given} or {*plan.results} & {*given[: len(owned)]}:
        return None
    places = {name: place for place, name in enumerate(plan.arguments)}
    pairs = zip(accumulated, owned, strict=True)
    accumulations = tuple([(step.param, numbers[step.gradient], bool(alone)) for step, alone in pairs])
    taken = tuple([places[name] for name in stage.arguments])
    return ShortPlan(call, taken, accumulations, tuple([numbers[name] for name in plan.results]))


def is_one_function(plan: StagePlan) -> bool:
    """Whether a plan runs one function, and no Python but for accumulations."""
    stages = sum(isinstance(step, RunStage) for step in plan.steps)
    return stages == 1 and all(isinstance(s, RunStage | AccumulateGrad | Free | FinalCallbacks) for s in plan.steps)
