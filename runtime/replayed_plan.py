# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A launch plan that is called at the same addresses again and again, as one CUDA graph.

Steps of a training allocate the same sizes in the same order, so torch's allocator gives each call of a plan the
addresses of an earlier one. What is queued for these is recorded as a graph, and queued by one call of the driver from
then on. A graph holds addresses and no memory: it is used for calls at these addresses alone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from retrograd.runtime.cuda_driver import Driver, Graph
from retrograd.runtime.prepared_plan import PreparedPlan
from retrograd.runtime.tensors import ExecutionError

# To queue a graph takes the host as long as two kernels.
_LEAST_STEPS = 3
# Batches and losses of two steps commonly lie in turn at two addresses, in the forward and in the backward.
_MOST_GRAPHS = 4
# Of addresses that were seen once, so many are remembered.
_REMEMBERED = 2 * _MOST_GRAPHS
# A plan whose addresses keep changing is not recorded any more.
_MOST_RECORDINGS = 2 * _MOST_GRAPHS


class ReplayedPlan:
    """Queues a plan; from the third call at some addresses on as a graph. The caller sees to it that one call at a
    time runs.

    ``replays`` counts calls that took one launch of the driver; ``reason`` says why nothing more is recorded.
    """

    def __init__(self, plan: PreparedPlan, driver: Driver) -> None:
        self.plan = plan.plan
        self.replays = 0
        self.reason: str | None = None
        self._prepared, self._driver = plan, driver
        self._graphs: OrderedDict[tuple[int, ...], Graph] = OrderedDict()
        self._seen: deque[tuple[int, ...]] = deque(maxlen=_REMEMBERED)
        self._recordings = 0
        if len(plan.plan.steps) < _LEAST_STEPS:
            self.reason = f"it has fewer than {_LEAST_STEPS} kernels, copies and fills"

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """Queue it on a stream, with addresses of its arguments and then of its scratch memory.

        Raises:
            ExecutionError: the driver refused something; names it.
        """
        key = tuple(addresses)
        graph = self._graphs.get(key)
        # What somebody captures is flat: graphs inside of graphs are replayed more slowly.
        if graph is not None and not self._driver.is_capturing(stream):
            self._graphs.move_to_end(key)
            self._driver.replay(graph, stream)
            self.replays += 1
            return
        self._prepared.run(addresses, stream)
        if graph is not None or self.reason is not None:
            return
        if key not in self._seen:
            self._seen.append(key)
        elif not self._driver.is_capturing(stream):
            self._record(key)

    def _record(self, key: tuple[int, ...]) -> None:
        """Keep a graph of calls at these addresses, in the place of the one that was not used for longest."""
        if self._recordings == _MOST_RECORDINGS:
            self.reason = "its arguments lie elsewhere at each call"
            return
        self._recordings += 1
        try:
            graph = self._driver.record(lambda stream: self._prepared.run(key, stream))
        except ExecutionError as error:
            # The call itself is queued; later ones are queued kernel by kernel too.
            self.reason = str(error)
            return
        self._graphs[key] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
