# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a plan of stages and islands has alive at a time, counted by hand."""

from __future__ import annotations

from retrograd.contract.plan import Free, RunIsland, RunStage, StagePlan, insert_frees
from retrograd.pipelines.stages.peaks import plan_peak

FIRST = RunStage("first", ("x",), ("a", "b"))
ISLAND = RunIsland(0, ("a",), ("p", ""), (30, 5))
LAST = RunStage("last", ("b", "p"), ("y",))
RESULTS = {"first": (10, 1), "last": (2,)}


def test_values_count_from_the_step_that_gives_them_to_their_last_use() -> None:
    plan = insert_frees(StagePlan(("x",), (FIRST, ISLAND, LAST), ("y",)))
    assert Free(("a",)) in plan.steps
    # While the island runs: what the first stage gave, and what it gives itself, used or not.
    assert plan_peak(plan, RESULTS, {}) == 10 + 1 + 30 + 5
    # While the last stage runs, "a" is freed.
    assert plan_peak(plan, RESULTS, {"last": 100}) == 1 + 30 + 2 + 100
    assert plan_peak(plan, RESULTS, {"first": 100, "last": 50}) == 10 + 1 + 100


def test_without_frees_everything_stays() -> None:
    plan = StagePlan(("x",), (FIRST, ISLAND, LAST), ("y",))
    assert plan_peak(plan, RESULTS, {"last": 100}) == 10 + 1 + 30 + 2 + 100


def test_arguments_are_their_callers() -> None:
    plan = insert_frees(StagePlan(("x", "b", "p"), (LAST,), ("y", "x")))
    assert plan_peak(plan, RESULTS, {"last": 7}) == 2 + 7
