# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A launch plan that is called many times, as one CUDA graph.

What a plan queues is recorded once, and queued by one call of the driver from then on. A graph holds addresses and no
memory. Steps of a training allocate the same sizes in the same order, so that torch's allocator mostly gives the
addresses of the step before; what lies elsewhere is changed in the graph, for less than it takes to queue a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrograd.runtime.cuda.driver import Driver, Graph, Node
from retrograd.runtime.cuda.prepared_plan import PreparedPlan
from retrograd.runtime.programs.errors import ExecutionError

# To queue a graph takes the host as long as two kernels.
_LEAST_STEPS = 3
# What is called once or twice is not worth a graph.
_CALLS_BEFORE = 2
_Cells = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass
class _Recorded:
    """A graph of a plan, its steps as they can be changed, and the addresses that they have in it."""

    graph: Graph
    nodes: list[Node]
    cells: _Cells


class ReplayedPlan:
    """Queues a plan, from its third call on as a graph. The caller sees to it that one call at a time runs.

    ``replays`` counts calls that took one launch of the driver, ``changes`` the steps that were changed for them;
    ``reason`` says why there is no graph.
    """

    def __init__(self, plan: PreparedPlan, driver: Driver) -> None:
        self.plan = plan.plan
        self.replays = self.changes = 0
        self.reason: str | None = None
        self._prepared, self._driver = plan, driver
        self._recorded: _Recorded | None = None
        self._steps = plan.steps_of_cells()
        self._calls = 0
        if len(plan.plan.steps) < _LEAST_STEPS:
            self.reason = f"it has fewer than {_LEAST_STEPS} kernels, copies and fills"

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """Queue it on a stream, with addresses of its arguments and then of its scratch memory.

        Raises:
            ExecutionError: the driver refused something; names it.
        """
        cells = self._prepared.place(addresses)
        if self.reason is None and self._calls >= _CALLS_BEFORE and not self._driver.is_capturing(stream):
            recorded = self._recorded or self._record(cells)
            if recorded is not None and self._change(recorded, cells):
                self._driver.replay(recorded.graph, stream)
                self.replays += 1
                return
        # What somebody captures is flat too: graphs inside of graphs are replayed more slowly.
        self._calls += 1
        for _ in self._prepared.queue(stream):
            pass

    def _record(self, cells: _Cells) -> _Recorded | None:
        """A graph with the addresses that are placed; none where the driver refuses it."""
        try:
            graph = self._driver.record(self._prepared.queue)
        except ExecutionError as error:
            self.reason = str(error)
            return None
        self._recorded = _Recorded(graph, self._prepared.make_nodes(), cells.copy())
        return self._recorded

    def _change(self, recorded: _Recorded, cells: _Cells) -> bool:
        """Give the graph the addresses that are placed. Says whether it has them; if not, there is no graph now."""
        (moved,) = np.nonzero(cells != recorded.cells)
        if not len(moved):
            return True
        try:
            for step in dict.fromkeys(self._steps[moved].tolist()):
                self._prepared.aim(recorded.nodes[step], step)
                self._driver.change(recorded.graph, step, recorded.nodes[step])
                self.changes += 1
        except ExecutionError as error:
            self.reason, self._recorded = str(error), None
            return False
        recorded.cells[:] = cells
        return True
