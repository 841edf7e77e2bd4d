# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The peak of live bytes of a step, from what its functions take and give and the scratch memory that they are laid out
with; of plans of stages and islands each value counts from the step that gives it to its last use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from retrograd.contract.plan import (
    FinishOffload,
    Free,
    RunIsland,
    RunStage,
    StagePlan,
    StartCollective,
    StartFetch,
    WaitCollective,
)
from retrograd.contract.roles import BACKWARD, FORWARD, INTO, MUTATION, SAVED, is_own_residual
from retrograd.pipelines.stages.interface import port_bytes
from retrograd.pipelines.stages.offloading import moved_bytes, moving_plans
from retrograd.pipelines.stages.staged import StagedModule


def step_peak(staged: StagedModule, scratch: dict[str, int]) -> int:
    """The peak of live bytes of a step: results, residuals, gradients and scratch memory, in each half; parameters and
    inputs are not counted.

    The forward's results stay alive through the backward (the caller holds the outputs, autograd the residuals);
    updated buffers are copied to their place and freed before it. Of what runs in torch, results are counted alone.
    """
    moved, handed = moved_bytes(staged), handed_over(staged)
    kept = (r for r in staged.function(FORWARD).results if r.role != MUTATION)
    held = sum(port_bytes(r) for r in kept if r.role != SAVED or r.value not in {*handed, *moved})
    return max(forward_peak(staged, scratch), held + half_peak(BACKWARD, _moving(staged), scratch, handed))


def forward_peak(staged: StagedModule, scratch: Mapping[str, int]) -> int:
    """The peak of the forward alone; residuals that go to the host leave while it runs."""
    return half_peak(FORWARD, _moving(staged), scratch, moved=moved_bytes(staged))


def forward_alone(staged: StagedModule, scratch: Mapping[str, int]) -> int:
    """Bytes that the forward takes in any case, what it saves apart: its other results, and its scratch memory; of one
    in stages the most that one of these has of the latter."""
    names = staged.plans[FORWARD].stages if FORWARD in staged.plans else (FORWARD,)
    results = sum(port_bytes(r) for r in staged.function(FORWARD).results if r.role != SAVED)
    return results + max((scratch.get(stage + INTO, 0) for stage in names), default=0)


def _moving(staged: StagedModule) -> StagedModule:
    return replace(staged, plans={**staged.plans, **moving_plans(staged)})


def handed_over(staged: StagedModule) -> dict[str, int]:
    """Bytes of the residuals that a backward in stages frees after their last use, by value; those that are on the host
    are not there when it begins."""
    if BACKWARD not in staged.plans:
        return {}
    own = {a.value for a in staged.function(BACKWARD).arguments if is_own_residual(a.role, a.name)}
    own.difference_update(moved_bytes(staged))
    return {r.value: port_bytes(r) for r in staged.function(FORWARD).results if r.role == SAVED and r.value in own}


def half_peak(
    name: str,
    staged: StagedModule,
    scratch: Mapping[str, int],
    handed: Mapping[str, int] | None = None,
    moved: Collection[str] = (),
) -> int:
    """Results and scratch memory of a half; of one that was cut, the most that a step of its plan has of both, and of
    the arguments that are ``handed`` over to it. Results ``moved`` are on the host when it ends."""
    whole = sum(port_bytes(r) for r in staged.function(name).results if r.value not in moved)
    if name not in staged.plans:
        return whole + scratch.get(name + INTO, 0)
    functions = {f.name: f for f in (*staged.functions, *staged.stages)}
    plan, results = staged.plans[name], {n: [port_bytes(r) for r in f.results] for n, f in functions.items()}
    arguments = zip(staged.function(name).arguments, plan.arguments, strict=True)
    taken = {known: handed[a.value] for a, known in arguments if handed and a.value in handed}
    return max(whole, plan_peak(plan, results, {f: scratch.get(f + INTO, 0) for f in results}, taken))


def unknown_scratch(staged: StagedModule, scratch: Mapping[str, int]) -> list[str]:
    """The functions whose scratch memory IREE's IR does not tell: it depends on more than sizes of arguments."""
    return [function.name for function in staged.stages if function.name + INTO not in scratch]


def plan_peak(
    plan: StagePlan,
    stage_results: Mapping[str, Sequence[int]],
    scratch: Mapping[str, int],
    arguments: Mapping[str, int] | None = None,
) -> int:
    """The most bytes that are alive at a time of what steps give, of the stages' scratch memory, and of ``arguments``,
    those by name that are handed over to the plan.

    ``stage_results`` are the bytes of each result of the stages, ``scratch`` what a stage takes while it runs; both by
    its name. Other arguments are their caller's. What torch takes while an island runs, besides its results, is not
    known and not counted.
    """
    alive = dict(arguments or {})
    peak = sum(alive.values())
    for step in plan.steps:
        match step:
            case RunStage():
                sizes, working = stage_results[step.function], scratch.get(step.function, 0)
            case RunIsland() | StartCollective():
                sizes, working = step.bytes, 0
            case WaitCollective():
                # The same memory.
                for started, value in zip(step.arguments, step.results, strict=False):
                    alive[value] = alive.pop(started, 0)
                continue
            case Free() | FinishOffload():
                for value in step.values:
                    alive.pop(value, None)
                continue
            case StartFetch():
                sizes, working = step.bytes, 0
            case _:
                continue
        given = list(zip(step.results, sizes, strict=True))
        alive |= {value: size for value, size in given if value}
        # What nobody uses is there until the step ends.
        working += sum(size for value, size in given if not value)
        peak = max(peak, sum(alive.values()) + working)
    return peak
