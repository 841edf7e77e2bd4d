# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Launch plans that are called at the same addresses again, through a driver that writes down what it is asked for."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from test_launcher import Library, prepare

from retrograd.contract.launches import Expected, Fill, LaunchPlan, Place
from retrograd.runtime.cuda_driver import Driver
from retrograd.runtime.replayed_plan import ReplayedPlan
from retrograd.runtime.tensors import ExecutionError

STEP = Fill(Place("argument", 0, 0), 4, 0, 4)


class Recorded:
    """A driver and a prepared plan in one: ``log`` says what was queued, and how."""

    def __init__(self, steps: int = 3) -> None:
        self.plan = LaunchPlan((Expected(),), 0, (STEP,) * steps)
        self.log: list[Any] = []
        self.capturing = False
        self.refuses = False

    def run(self, addresses: Sequence[int], stream: int) -> None:
        self.log.append(("run", tuple(addresses), stream))

    def record(self, queue: Callable[[int], None]) -> Any:
        if self.refuses:
            raise ExecutionError("refused")
        start = len(self.log)
        queue(99)
        recorded = self.log[start:]
        del self.log[start:]
        return recorded

    def replay(self, graph: Any, stream: int) -> None:
        (_, addresses, _), *rest = graph
        assert not rest
        self.log.append(("replay", addresses, stream))

    def is_capturing(self, stream: int) -> bool:
        return self.capturing


def replayed(recorded: Recorded) -> ReplayedPlan:
    return ReplayedPlan(recorded, recorded)  # type: ignore[arg-type]


def test_the_third_call_at_some_addresses_is_a_replay() -> None:
    recorded = Recorded()
    plan = replayed(recorded)
    for place in (1, 2, 1, 2, 1, 2, 3):
        plan.run([place, 5], 42)
    kinds = ["run", "run", "run", "run", "replay", "replay", "run"]
    assert recorded.log == [(k, (p, 5), 42) for k, p in zip(kinds, (1, 2, 1, 2, 1, 2, 3), strict=True)]
    assert plan.replays == 2
    assert plan.reason is None


def test_a_graph_is_replayed_on_the_stream_of_the_call() -> None:
    recorded = Recorded()
    plan = replayed(recorded)
    for stream in (42, 42, 43):
        plan.run([1], stream)
    assert recorded.log[-1] == ("replay", (1,), 43)


def test_the_graph_that_was_not_used_for_longest_goes() -> None:
    recorded = Recorded()
    plan = replayed(recorded)
    for place in (1, 1, 2, 2, 3, 3, 4, 4, 1, 5, 5):
        plan.run([place], 42)
    recorded.log.clear()
    for place in (1, 3, 4, 5, 2):
        plan.run([place], 42)
    assert [kind for kind, *_ in recorded.log] == ["replay"] * 4 + ["run"]


def test_addresses_that_keep_changing_are_not_recorded() -> None:
    recorded = Recorded()
    plan = replayed(recorded)
    for place in range(40):
        plan.run([place], 42)
        plan.run([place], 42)
    assert {kind for kind, *_ in recorded.log} == {"run"}
    assert plan.reason == "its arguments lie elsewhere at each call"


def test_of_many_calls_at_other_addresses_few_are_remembered() -> None:
    recorded = Recorded()
    plan = replayed(recorded)
    for _ in range(3):
        for place in range(20):
            plan.run([place], 42)
    assert {kind for kind, *_ in recorded.log} == {"run"}
    assert plan.reason is None


def test_what_somebody_captures_is_queued_step_by_step() -> None:
    recorded = Recorded()
    plan = replayed(recorded)
    recorded.capturing = True
    for _ in range(4):
        plan.run([1], 42)
    recorded.capturing = False
    plan.run([1], 42)
    plan.run([1], 42)
    recorded.capturing = True
    plan.run([1], 42)
    assert [kind for kind, *_ in recorded.log] == ["run"] * 5 + ["replay", "run"]


@pytest.mark.parametrize(
    ("steps", "refuses", "reason"), [(2, False, "fewer than 3 kernels"), (3, True, "refused")], ids=["short", "refused"]
)
def test_what_is_not_recorded_runs_all_the_same(steps: int, refuses: bool, reason: str) -> None:
    recorded = Recorded(steps)
    recorded.refuses = refuses
    plan = replayed(recorded)
    for _ in range(4):
        plan.run([1], 42)
    assert [kind for kind, *_ in recorded.log] == ["run"] * 4
    assert reason in str(plan.reason)


def test_the_driver_is_asked_to_record_on_a_stream_of_its_own() -> None:
    library = Library()
    prepared = prepare(library)
    graph = Driver(library).record(lambda stream: prepared.run([1000, 2000, 5000], stream))
    names = [name for name, *_ in library.calls]
    queued = ["cuMemsetD32Async", "cuLaunchKernelEx", "cuMemcpyDtoDAsync_v2", "cuMemcpyDtoDAsync_v2"]
    assert names[:2] == ["cuStreamCreate", "cuStreamBeginCapture_v2"]
    assert names[2:6] == queued
    assert names[6:] == ["cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuStreamDestroy_v2"]
    library.calls.clear()
    Driver(library).replay(graph, 42)
    assert [(name, stream) for name, _, stream in library.calls] == [("cuGraphLaunch", 42)]
    library.calls.clear()
    del graph
    gc.collect()
    assert [name for name, *_ in library.calls] == ["cuGraphExecDestroy"]


@pytest.mark.parametrize("refused", ["cuStreamBeginCapture_v2", "cuLaunchKernelEx", "cuStreamEndCapture"])
def test_what_cannot_be_recorded_leaves_nothing_behind(refused: str) -> None:
    library = Library()
    prepared = prepare(library)
    driver = Driver(library)
    library.functions[refused].status = 1
    with pytest.raises(ExecutionError, match="CUDA's driver failed to"):
        driver.record(lambda stream: prepared.run([1000, 2000, 5000], stream))
    names = [name for name, *_ in library.calls]
    assert names[-1] == "cuStreamDestroy_v2"
    assert ("cuStreamEndCapture" in names) == (refused != "cuStreamBeginCapture_v2")
