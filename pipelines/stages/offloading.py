# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The plans of a staged module by which its residuals go to the host and come back."""

from __future__ import annotations

from collections.abc import Mapping

from retrograd.contract.plan import StagePlan, insert_frees, whole_plan
from retrograd.contract.roles import BACKWARD, FORWARD, is_own_residual
from retrograd.contract.tensors import FunctionSpec
from retrograd.pipelines.analysis.stages.offload_steps import (
    fetch_arguments,
    find_at_turn,
    find_movable,
    offload_results,
)
from retrograd.pipelines.stages.interface import port_bytes
from retrograd.pipelines.stages.staged import StagedModule


def moved_bytes(staged: StagedModule) -> dict[str, int]:
    """Bytes of the residuals that go to the host, by the names of their values: those that were chosen, and that the
    forward computes as results of their own, but for those that its last stage gives and the backward's first one
    takes. A module without a forward, the backward of a loss that leaves out outputs, has those that it takes."""
    if not staged.offloaded:
        return {}
    chosen = {
        a.value: port_bytes(a)
        for a in staged.function(BACKWARD).arguments
        if a.value in staged.offloaded and is_own_residual(a.role, a.name)
    }
    if all(function.name != FORWARD for function in staged.functions):
        return chosen
    forward, backward = staged.function(FORWARD), staged.function(BACKWARD)
    plan, back = plain_plan(staged, forward), plain_plan(staged, backward)
    given = dict(zip((result.value for result in forward.results), plan.results, strict=True))
    taken = dict(zip((argument.value for argument in backward.arguments), back.arguments, strict=True))
    movable = find_movable(plan, [given[value] for value in chosen])
    last, first = find_at_turn(plan, back)
    return {
        value: size
        for value, size in chosen.items()
        if given[value] in movable and not (given[value] in last and taken[value] in first)
    }


def moving_plans(staged: StagedModule) -> dict[str, StagePlan]:
    """The plans of the halves, by name, that keep residuals on the host; none where nothing goes there."""
    moved = moved_bytes(staged)
    return {f.name: moving_plan(staged, f, moved) for f in staged.functions} if moved else {}


def moving_plan(staged: StagedModule, function: FunctionSpec, moved: Mapping[str, int]) -> StagePlan:
    """The plan of a half that keeps the residuals ``moved`` on the host."""
    plan = plain_plan(staged, function)
    if function.name == FORWARD:
        results = zip(plan.results, function.results, strict=True)
        return offload_results(plan, {known for known, result in results if result.value in moved})
    arguments = zip(plan.arguments, function.arguments, strict=True)
    return fetch_arguments(plan, {known: moved[a.value] for known, a in arguments if a.value in moved})


def plain_plan(staged: StagedModule, function: FunctionSpec) -> StagePlan:
    """The plan of a half by which nothing goes to the host."""
    return staged.plans.get(function.name) or insert_frees(whole_plan(function))
