# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Plans that keep residuals on the host: where copies begin and are waited for, what is alive meanwhile, and how they
run; moves are made by a stand-in on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from retrograd.contract.device_rates import DeviceRates
from retrograd.contract.moves import Transfer
from retrograd.contract.plan import (
    FinishFetch,
    FinishOffload,
    Free,
    RunIsland,
    RunStage,
    StagePlan,
    StartFetch,
    StartOffload,
    find_plan_problems,
    insert_frees,
)
from retrograd.pipelines.analysis.stages.offload_steps import (
    fetch_arguments,
    find_at_turn,
    find_movable,
    offload_results,
)
from retrograd.pipelines.stages.peaks import plan_peak
from retrograd.runtime.programs.errors import ExecutionError
from retrograd.runtime.steps.stage_executor import StageExecutor

NO_PROGRAM: Any = None


def island(number: int, arguments: str, results: str) -> RunIsland:
    return RunIsland(number, tuple(arguments), tuple(results), (1,) * len(results))


FORWARD = insert_frees(
    StagePlan(
        ("x",), (island(0, "x", "ar"), island(1, "a", "bs"), island(2, "br", "ct"), island(3, "c", "y")), tuple("yrst")
    )
)
BACKWARD = insert_frees(
    StagePlan(
        tuple("rstd"), (island(0, "dt", "e"), island(1, "e", "f"), island(2, "fsr", "g"), island(3, "gr", "h")), ("h",)
    )
)


def stage(number: int, arguments: str, results: str) -> RunStage:
    return RunStage(f"stage_{number}", tuple(arguments), tuple(results))


def test_residuals_leave_behind_the_next_stage_or_their_last_use() -> None:
    steps = (stage(0, "x", "ar"), island(0, "a", "bs"), stage(1, "br", "ct"), stage(2, "c", "y"))
    plan = offload_results(insert_frees(StagePlan(("x",), steps, tuple("yrst"))), set("rst"))
    assert [step for step in plan.steps if not isinstance(step, Free)] == [
        stage(0, "x", "ar"),
        StartOffload(("r",), ("r (host)",)),
        # What it runs beside ends at once.
        island(0, "a", "bs"),
        StartOffload(("s",), ("s (host)",)),
        stage(1, "br", "ct"),
        StartOffload(("t",), ("t (host)",)),
        # The second stage reads the first's.
        FinishOffload(("r", "s")),
        stage(2, "c", "y"),
        FinishOffload(("t",)),
    ]
    assert plan.results == ("y", "r (host)", "s (host)", "t (host)")


def test_residuals_are_back_from_one_stage_before_their_first_use_on() -> None:
    steps = (stage(0, "dt", "e"), island(0, "e", "f"), stage(1, "fsr", "g"), stage(2, "gru", "h"))
    back = insert_frees(StagePlan(tuple("rstud"), steps, ("h",)))
    plan = fetch_arguments(back, {"r": 3, "s": 5, "t": 7, "u": 9})
    assert [step for step in plan.steps if not (isinstance(step, Free) and "(host)" not in step.values[0])] == [
        StartFetch(("t (host)",), ("t",), (7,)),
        Free(("t (host)",)),
        FinishFetch(("t",)),
        StartFetch(("r (host)", "s (host)"), ("r", "s"), (3, 5)),
        Free(("r (host)", "s (host)")),
        stage(0, "dt", "e"),
        island(0, "e", "f"),
        FinishFetch(("r", "s")),
        StartFetch(("u (host)",), ("u",), (9,)),
        Free(("u (host)",)),
        stage(1, "fsr", "g"),
        FinishFetch(("u",)),
        stage(2, "gru", "h"),
    ]
    assert plan.arguments == ("r (host)", "s (host)", "t (host)", "u (host)", "d")


def test_plans_with_moves_have_no_problems() -> None:
    for plan in (offload_results(FORWARD, set("rst")), fetch_arguments(BACKWARD, {"r": 3, "s": 5, "t": 7})):
        assert list(find_plan_problems(plan, ())) == []


def test_what_would_come_back_as_soon_as_it_has_left_stays() -> None:
    assert find_at_turn(FORWARD, BACKWARD) == (frozenset("y"), frozenset("dt"))
    steps = (stage(0, "x", "ar"), stage(1, "a", "yt"))
    forward = insert_frees(StagePlan(("x",), steps, tuple("yrt")))
    assert find_at_turn(forward, BACKWARD) == (frozenset("yt"), frozenset("dt"))
    whole = insert_frees(StagePlan(("x",), (stage(0, "x", "yrt"),), tuple("yrt")))
    assert find_at_turn(whole, BACKWARD) == (frozenset(), frozenset())


def test_a_function_in_one_piece() -> None:
    whole = insert_frees(StagePlan(("x",), (RunStage("forward", ("x",), ("y", "r")),), ("y", "r")))
    assert offload_results(whole, {"r"}).steps[-2:] == (StartOffload(("r",), ("r (host)",)), FinishOffload(("r",)))
    back = insert_frees(StagePlan(("r", "d"), (RunStage("backward", ("r", "d"), ("g",)),), ("g",)))
    fetched = fetch_arguments(back, {"r": 4}).steps
    assert fetched[0] == StartFetch(("r (host)",), ("r",), (4,))
    assert fetched[2:] == (FinishFetch(("r",)), RunStage("backward", ("r", "d"), ("g",)), Free(("r", "d")))


def test_what_no_step_takes_stays_on_the_host() -> None:
    plan = insert_frees(StagePlan(("r", "d"), (island(0, "d", "g"),), ("g",)))
    assert fetch_arguments(plan, {"r": 4}) == plan


def test_results_that_somebody_else_has_do_not_move() -> None:
    plan = StagePlan(("x",), (island(0, "x", "rs"),), ("r", "s", "r", "x"))
    assert find_movable(plan, ["r", "s", "x"]) == {"s"}


def test_what_is_alive() -> None:
    sizes = {"r": 100, "s": 1000, "t": 10000}
    plan = StagePlan(
        ("x",),
        (
            RunStage("a", ("x",), ("a", "r")),
            RunStage("b", ("a",), ("b", "s")),
            RunStage("c", ("b",), ("y", "t")),
        ),
        ("y", "r", "s", "t"),
    )
    results = {"a": (1, 100), "b": (2, 1000), "c": (4, 10000)}
    plain = insert_frees(plan)
    assert plan_peak(plain, results, {}) == 11100 + 2 + 4
    moved = offload_results(plain, set("rst"))
    # While the last runs, the first's are gone, and the second's are on their way.
    assert plan_peak(moved, results, {}) == 1000 + 10000 + 2 + 4
    back = insert_frees(
        StagePlan(
            ("r", "s", "t"),
            (
                RunStage("c", ("t",), ("u",)),
                RunStage("b", ("u", "s"), ("v",)),
                RunStage("a", ("v", "r"), ("g",)),
            ),
            ("g",),
        )
    )
    given = {"a": (1,), "b": (2,), "c": (4,)}
    assert plan_peak(back, given, {}, sizes) == 11100 + 4
    # The second's are there while the first runs.
    assert plan_peak(fetch_arguments(back, sizes), given, {}) == 10000 + 1000 + 4
    assert plan_peak(fetch_arguments(back, sizes), given, {"a": 20000}) == 20000 + 100 + 2 + 1


# -- How they run -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Late:
    """Copies that are made when they are waited for."""

    pairs: list[tuple[Tensor, Tensor]]
    log: list[str]

    def finish(self) -> None:
        for source, target in self.pairs:
            target.copy_(source)
        self.log.append(f"finish {len(self.pairs)}")


@dataclass
class Mover:
    log: list[str] = field(default_factory=list)

    def offload(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Transfer]:
        return self._start("offload", tensors)

    def fetch(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Transfer]:
        return self._start("fetch", tensors)

    def is_host(self, tensor: Tensor) -> bool:
        return True

    def is_free(self) -> bool:
        return True

    def measure(self) -> DeviceRates:
        return DeviceRates(1.0, 1.0, 1.0, 1.0)

    def _start(self, what: str, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Transfer]:
        made = [torch.full_like(tensor, float("nan")) for tensor in tensors]
        self.log.append(f"{what} {len(made)}")
        return made, Late(list(zip(tensors, made, strict=True)), self.log)


def forward_islands() -> list[Any]:
    return [
        lambda v: [v[0] + 1, v[0] * 2],
        lambda v: [v[0] + 1, v[0] * 3],
        lambda v: [v[0] + v[1], v[0] * 5],
        lambda v: [v[0] + 1],
    ]


def backward_islands() -> list[Any]:
    return [
        lambda v: [v[0] * v[1]],
        lambda v: [v[0] + 1],
        lambda v: [v[0] * v[1] + v[2]],
        lambda v: [v[0] * v[1]],
    ]


@pytest.mark.parametrize("count", range(4))
def test_values_are_those_of_the_plain_plan(count: int) -> None:
    for moved in map(set, itertools.combinations("rst", count)):
        mover = Mover()
        x, d = torch.tensor([2.0]), torch.tensor([3.0])
        plain = StageExecutor(FORWARD, NO_PROGRAM, [], forward_islands()).run([x])
        plan = offload_results(FORWARD, moved)
        given = StageExecutor(plan, NO_PROGRAM, [], forward_islands(), mover).run([x])
        assert given == plain
        expected = StageExecutor(BACKWARD, NO_PROGRAM, [], backward_islands()).run([*plain[1:], d])
        back = StageExecutor(
            fetch_arguments(BACKWARD, dict.fromkeys(moved, 1)), NO_PROGRAM, [], backward_islands(), mover
        )
        # Of a retained graph, twice.
        for _ in range(2):
            assert back.run([*given[1:], d]) == expected


def test_copies_that_were_started_together_are_waited_for_once() -> None:
    mover = Mover()
    plan = fetch_arguments(BACKWARD, {"r": 1, "s": 1, "t": 1})
    one = torch.ones(1)
    StageExecutor(plan, NO_PROGRAM, [], backward_islands(), mover).run([one, one, one, one])
    assert mover.log == ["fetch 1", "finish 1", "fetch 2", "finish 2"]


@pytest.mark.parametrize("fails", range(4))
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_failure_waits_for_what_is_under_way(fails: int, half: str) -> None:
    def fail(_values: Any) -> list[Tensor]:
        raise MemoryError("no more")

    mover, one = Mover(), torch.ones(1)
    islands = forward_islands() if half == "forward" else backward_islands()
    islands[fails] = fail
    plan = (
        offload_results(FORWARD, set("rst"))
        if half == "forward"
        else fetch_arguments(BACKWARD, {"r": 1, "s": 1, "t": 1})
    )
    arguments = [one] if half == "forward" else [one, one, one, one]
    with pytest.raises(MemoryError):
        StageExecutor(plan, NO_PROGRAM, [], islands, mover).run(arguments)
    started = sum(int(line.split()[1]) for line in mover.log if not line.startswith("finish"))
    finished = sum(int(line.split()[1]) for line in mover.log if line.startswith("finish"))
    assert finished >= started


def test_a_plan_with_moves_needs_a_mover() -> None:
    with pytest.raises(ExecutionError, match="there is nothing that moves them"):
        StageExecutor(offload_results(FORWARD, {"r"}), NO_PROGRAM, [], forward_islands())


def test_a_plan_with_moves_as_data() -> None:
    for plan in (offload_results(FORWARD, set("rs")), fetch_arguments(BACKWARD, {"r": 1, "t": 2})):
        assert StagePlan.from_dict(plan.to_dict()) == plan


def test_a_copy_that_is_not_there_is_refused() -> None:
    plan = StagePlan(("x",), (StartOffload(("r",), ("r (host)",)),), ())
    assert list(find_plan_problems(plan, ())) == ["step 0 takes 'r', which is not there"]
