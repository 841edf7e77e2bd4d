# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which arguments a compiled function may overwrite once it has read them: those that nobody needs after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set

from retrograd.contract.plan import Free, RunStage, StagePlan
from retrograd.contract.roles import BACKWARD, INTO, is_own_residual
from retrograd.contract.tensors import FunctionSpec


def find_donated(functions: Iterable[FunctionSpec], plans: Mapping[str, StagePlan]) -> dict[str, tuple[int, ...]]:
    """The arguments that functions of a step may overwrite, as numbers, by the name of the function that takes storage;
    ``plans`` are those of the functions that are cut.

    Residuals of a backward in one piece; of what is cut into stages, what the plan frees behind the stage that takes
    it: residuals, and what a stage gave. That nobody else has them is known when it is called.
    """
    found: dict[str, tuple[int, ...]] = {}
    for function in functions:
        own = [is_own_residual(a.role, a.name) for a in function.arguments]
        if function.name in plans:
            plan = plans[function.name]
            found |= find_freed(plan, {value for value, is_own in zip(plan.arguments, own, strict=False) if is_own})
        elif function.name == BACKWARD:
            found[BACKWARD + INTO] = tuple(n for n, is_own in enumerate(own) if is_own)
    return {name: numbers for name, numbers in found.items() if numbers}


def find_freed(plan: StagePlan, own: Set[str]) -> dict[str, tuple[int, ...]]:
    """Of the stages that ``plan`` calls once the arguments that it frees right behind them, of those that a stage gave,
    or that are the plan's ``own``."""
    calls = Counter(plan.stages)
    given = set(own)
    found: dict[str, tuple[int, ...]] = {}
    for number, step in enumerate(plan.steps):
        if not isinstance(step, RunStage):
            continue
        freed: set[str] = set()
        for later in plan.steps[number + 1 :]:
            if not isinstance(later, Free):
                break
            freed.update(later.values)
        taken = Counter(step.arguments)
        if calls[step.function] == 1:
            found[step.function + INTO] = tuple(
                n for n, value in enumerate(step.arguments) if value in freed & given and taken[value] == 1
            )
        given.update(step.results)
    return found
