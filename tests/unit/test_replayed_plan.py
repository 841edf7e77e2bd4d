# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Launch plans that are called many times, through a driver that writes down what it is asked for."""

import ctypes
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest
from test_launcher import Library, prepare

from retrograd.contract.launches import Expected, Fill, LaunchPlan, Place
from retrograd.runtime.cuda.driver import CopyNode, Driver, FillNode, KernelNode, Node
from retrograd.runtime.cuda.prepared_plan import PreparedPlan
from retrograd.runtime.cuda.replayed_plan import ReplayedPlan
from retrograd.runtime.programs.errors import ExecutionError

# A fill of scratch memory, a kernel that reads argument 1 and scratch memory, and two copies to argument 0.
CALL = [1000, 2000, 5000]


@dataclass
class Device:
    """Stands for a driver where graphs are asked for: what it was asked, in ``log``."""

    log: list[Any] = field(default_factory=list)
    capturing: bool = False
    refused: frozenset[str] = frozenset()

    def record(self, queue: Callable[[int], Iterable[None]]) -> str:
        self.ask("record")
        self.log.append(("recorded", len(list(queue(99)))))
        return "graph"

    def change(self, graph: str, step: int, node: Node) -> None:
        self.ask("change")
        self.log.append((step, addresses_of(node)))

    def replay(self, graph: str, stream: int) -> None:
        self.log.append(("replay", stream))

    def is_capturing(self, stream: int) -> bool:
        return self.capturing

    def ask(self, what: str) -> None:
        if what in self.refused:
            raise ExecutionError(f"refused to {what}")


def addresses_of(node: Node) -> list[int]:
    """What a node reads and writes, of a kernel with its constants."""
    if isinstance(node, KernelNode):
        places = ctypes.cast(node.arguments, ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)))
        return [places[i][0] for i in range(4)]
    return [node.source.address, node.target.address] if isinstance(node, CopyNode) else [node.target]


def replayed(device: Device) -> tuple[ReplayedPlan, list[Any]]:
    """The plan, and what is queued of it step by step."""
    library = Library()
    return ReplayedPlan(prepare(library), device), library.calls  # type: ignore[arg-type]


def test_the_third_call_is_a_replay() -> None:
    device = Device()
    plan, queued = replayed(device)
    for _ in range(2):
        plan.run(CALL, 42)
    assert len(queued) == 8 and device.log == []
    for stream in (42, 43):
        plan.run(CALL, stream)
    assert device.log == [("recorded", 4), ("replay", 42), ("replay", 43)]
    assert (plan.replays, plan.changes) == (2, 0)


def test_steps_that_read_what_lies_elsewhere_are_changed() -> None:
    device = Device()
    plan, _ = replayed(device)
    for _ in range(3):
        plan.run(CALL, 42)
    device.log.clear()
    plan.run([3000, 2000, 5000], 42)
    assert device.log == [(2, [5016, 3000]), (3, [9004, 3008]), ("replay", 42)]
    device.log.clear()
    plan.run([3000, 4000, 6000], 42)
    assert device.log == [(0, [6016]), (1, [4008, 6016, 7, 9]), (2, [6016, 3000]), ("replay", 42)]
    device.log.clear()
    plan.run([3000, 4000, 6000], 42)
    assert device.log == [("replay", 42)]
    assert (plan.replays, plan.changes) == (4, 5)


def test_what_somebody_captures_is_queued_step_by_step() -> None:
    device = Device()
    plan, queued = replayed(device)
    for _ in range(3):
        plan.run(CALL, 42)
    queued.clear()
    device.capturing = True
    plan.run(CALL, 42)
    assert len(queued) == 4
    device.capturing = False
    plan.run(CALL, 42)
    assert len(queued) == 4 and plan.replays == 2


@pytest.mark.parametrize("what", ["record", "change"])
def test_what_the_driver_refuses_is_queued_step_by_step(what: str) -> None:
    device = Device(refused=frozenset({what}))
    plan, queued = replayed(device)
    for place in range(4):
        queued.clear()
        plan.run([1000 + 64 * place, 2000, 5000], 42)
    assert queued[-4][0] == "cuMemsetD32Async"
    assert queued[-1][1] == 1000 + 64 * 3 + 8
    assert plan.reason == f"refused to {what}"


def test_a_short_plan_is_no_graph() -> None:
    library, device = Library(), Device()
    fills = (Fill(Place("argument", 0, 0), 4, 0, 4),) * 2
    short = PreparedPlan("f", LaunchPlan((Expected(),), 0, fills), Driver(library), Mock(), {})
    plan = ReplayedPlan(short, device)  # type: ignore[arg-type]
    for _ in range(4):
        plan.run([1000, 0], 42)
    assert len(library.calls) == 8 and device.log == []
    assert plan.reason == "it has fewer than 3 kernels, copies and fills"


def test_the_driver_records_on_a_stream_of_its_own_and_changes_steps() -> None:
    library = Library()
    prepared, driver = prepare(library), Driver(library)
    prepared.place(CALL)
    graph = driver.record(prepared.queue)
    names = [name for name, *_ in library.calls]
    assert names[:3] == ["cuCtxGetCurrent", "cuStreamCreate", "cuStreamBeginCapture_v2"]
    assert names[3:11:2] == ["cuMemsetD32Async", "cuLaunchKernelEx", "cuMemcpyDtoDAsync_v2", "cuMemcpyDtoDAsync_v2"]
    assert names[11:] == ["cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuStreamDestroy_v2"]
    assert graph.nodes == [701, 702, 703, 704]
    library.calls.clear()
    for step, node in enumerate(prepared.make_nodes()):
        driver.change(graph, step, node)
    kinds = ["Memset", "Kernel", "Memcpy", "Memcpy"]
    named = [name.removeprefix("cuGraphExec").partition("Node")[0] for name, *_ in library.calls]
    assert named == kinds
    assert [call[2] for call in library.calls] == graph.nodes
    library.calls.clear()
    del graph
    gc.collect()
    assert [name for name, *_ in library.calls] == ["cuGraphExecDestroy", "cuGraphDestroy"]


def test_nodes_do_what_their_steps_do() -> None:
    prepared = prepare(Library())
    prepared.place(CALL)
    fill, kernel, copy, _ = prepared.make_nodes()
    assert isinstance(fill, FillNode) and isinstance(kernel, KernelNode) and isinstance(copy, CopyNode)
    assert (fill.value, fill.element, fill.width, fill.height) == (0xFF, 4, 2, 1)
    assert (list(kernel.grid), list(kernel.block), kernel.shared, kernel.function) == ([4, 2, 1], [32, 1, 1], 64, 5)
    assert (copy.width, copy.height, copy.depth, copy.source.kind, copy.target.kind) == (8, 1, 1, 2, 2)
    # As the driver's headers have them.
    assert [ctypes.sizeof(type_) for type_ in (KernelNode, FillNode, CopyNode)] == [72, 40, 200]


@pytest.mark.parametrize("refused", ["cuStreamBeginCapture_v2", "cuLaunchKernelEx", "cuStreamEndCapture"])
def test_what_cannot_be_recorded_leaves_nothing_behind(refused: str) -> None:
    library = Library()
    prepared = prepare(library)
    driver = Driver(library)
    library.functions[refused].status = 1
    with pytest.raises(ExecutionError, match="CUDA's driver failed to"):
        driver.record(prepared.queue)
    names = [name for name, *_ in library.calls]
    assert names[-1] == "cuStreamDestroy_v2"
    assert ("cuStreamEndCapture" in names) == (refused != "cuStreamBeginCapture_v2")
