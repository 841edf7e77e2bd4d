# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How much memory a plan of stages and islands takes: each value from the step that gives it to its last use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from retrograd.contract.plan import Free, RunIsland, RunStage, StagePlan


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
            case RunIsland():
                sizes, working = step.bytes, 0
            case Free():
                for value in step.values:
                    alive.pop(value, None)
                continue
            case _:
                continue
        given = list(zip(step.results, sizes, strict=True))
        alive |= {value: size for value, size in given if value}
        # What nobody uses is there until the step ends.
        working += sum(size for value, size in given if not value)
        peak = max(peak, sum(alive.values()) + working)
    return peak
