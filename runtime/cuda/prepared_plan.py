# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A launch plan for many calls: its calls of the driver, put together once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from retrograd.contract.launches import Copy, Kernel, LaunchPlan, Place, Step, Write
from retrograd.runtime.cuda.driver import CopyNode, Driver, FillNode, KernelNode, LaunchConfig, Node


class PreparedPlan:
    """A plan whose calls of the driver are put together: what differs from call to call are addresses and the stream.

    Addresses and constants are 64-bit cells of one array, which kernels' parameters point to; the driver has read them
    when a launch returns. The caller sees to it that one call at a time runs.
    """

    def __init__(
        self,
        name: str,
        plan: LaunchPlan,
        driver: Driver,
        function: Callable[[Kernel], tuple[ctypes.c_void_p, tuple[int, int, int], int]],
        globals_: dict[str, int],
    ) -> None:
        self.plan = plan
        self._name, self._driver = name, driver
        self._globals = globals_
        self._scratch = len(plan.arguments)
        self._fixed = self._scratch + 1
        places = [self._split(place) for step in plan.steps for place in _places(step)]
        constants = [c for step in plan.steps if isinstance(step, Kernel) for c in step.constants]
        self._count = len(places)
        self._cells = np.array([*[0] * len(places), *constants], dtype=np.uint64)
        self._bases = np.array([base for base, _ in places], dtype=np.intp)
        self._offsets = np.array([offset for _, offset in places], dtype=np.uint64)
        self._configs: list[LaunchConfig] = []
        # Torch's own stream has number 0.
        self._stream = 0
        self._calls = self._make_calls(function)

    def _split(self, place: Place) -> tuple[int, int]:
        """The number of an address among those of a call, and what to add; the last one is 0."""
        if place.base == "argument":
            return int(place.which), place.offset
        if place.base == "scratch":
            return self._scratch, place.offset
        return self._fixed, self._globals[str(place.which)] + place.offset

    def _make_calls(self, function: Callable[[Kernel], Any]) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []
        cell, constant = 0, self._count
        start = self._cells.ctypes.data
        for step in self.plan.steps:
            if isinstance(step, Kernel):
                handle, block, shared = function(step)
                numbers = [*range(cell, cell + len(step.bindings)), *range(constant, constant + len(step.constants))]
                pointers = (ctypes.c_void_p * len(numbers))(*(start + 8 * number for number in numbers))
                config = LaunchConfig(step.grid, block, shared)
                self._configs.append(config)
                calls.append((step, (ctypes.byref(config), handle, pointers, None), cell))
                constant += len(step.constants)
            else:
                calls.append((step, None, cell))
            cell += len(_places(step))
        return calls

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """Queue it on a stream, with addresses of its arguments and then of its scratch memory.

        Raises:
            ExecutionError: the driver refused something; names it.
        """
        self.place(addresses)
        for _ in self.queue(stream):
            pass

    def place(self, addresses: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Put the addresses of a call where its steps read them. Gives all that steps read, which the next call
        overwrites."""
        bases = np.array([*addresses, 0], dtype=np.uint64)
        found = self._cells[: self._count]
        np.add(bases[self._bases], self._offsets, out=found)
        return found

    def queue(self, stream: int) -> Iterator[None]:
        """Queue it on a stream with the addresses that were placed last, a step at a time.

        Raises:
            ExecutionError: the driver refused something; names it.
        """
        if stream != self._stream:
            for config in self._configs:
                config.stream = stream
            self._stream = stream
        launch = self._driver.launch
        for step, kernel, cell in self._calls:
            if kernel is not None:
                status = launch(*kernel)
            elif isinstance(step, Copy):
                status = self._driver.copy(int(self._cells[cell + 1]), int(self._cells[cell]), step.length, stream)
            elif isinstance(step, Write):
                # The driver has read the bytes when it returns, or while an initializer waits for the stream.
                status = self._driver.write(int(self._cells[cell]), step.contents, len(step.contents), stream)
            else:
                count = step.length // step.width
                status = self._driver.fills[step.width](int(self._cells[cell]), step.pattern, count, stream)
            if status:
                self._driver.check(status, f"queue {_describe(step)} of {self._name}")
            yield

    def make_nodes(self) -> list[Node]:
        """Make the plan's steps nodes of a graph, which read what is placed."""
        nodes: list[Node] = []
        configs = iter(self._configs)
        for step, kernel, _ in self._calls:
            if kernel is not None:
                config, (_, handle, pointers, _) = next(configs), kernel
                place = ctypes.cast(pointers, ctypes.c_void_p)
                nodes.append(KernelNode(handle, config.grid, config.block, config.shared, place))
            elif isinstance(step, Copy):
                nodes.append(CopyNode.of(step.length))
            elif isinstance(step, Write):
                raise AssertionError("a function writes a constant, which is an initializer's to do")
            else:
                nodes.append(FillNode(0, 0, step.pattern, step.width, step.length // step.width, 1))
        return nodes

    def aim(self, node: Node, step: int) -> None:
        """Set the addresses of a copy or a fill; kernels read theirs where they are placed."""
        cell = self._calls[step][2]
        if isinstance(node, CopyNode):
            node.source.address, node.target.address = int(self._cells[cell]), int(self._cells[cell + 1])
        elif isinstance(node, FillNode):
            node.target = int(self._cells[cell])

    def steps_of_cells(self) -> np.ndarray[Any, np.dtype[np.intp]]:
        """The step that reads each of the placed addresses."""
        counts = [len(_places(step)) for step in self.plan.steps]
        return np.repeat(np.arange(len(counts)), counts)


def _places(step: Step) -> tuple[Place, ...]:
    if isinstance(step, Kernel):
        return step.bindings
    return (step.source, step.target) if isinstance(step, Copy) else (step.target,)


def _describe(step: Step) -> str:
    return f"kernel {step.entry}" if isinstance(step, Kernel) else f"a {type(step).__name__.lower()}"
