# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The kernels of a function, by the buffers that they read and write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from retrograd.pipelines.analysis.partition.joint_graph import JointGraph, Op
from retrograd.pipelines.analysis.partition.op_kinds import INDEX_OPERANDS


class Step(NamedTuple):
    """One kernel: the buffers that it reads, and those that it writes. A buffer is the number of the value in it, or
    beyond the values' numbers for a copy; it is in memory from the step that writes it to the last that reads it."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class Steps:
    """The kernels of a function in order, and the bytes of each buffer that is scratch memory of the function."""

    steps: tuple[Step, ...]
    bytes: dict[int, int]


def find_listed(graph: JointGraph, value: int) -> tuple[int, ...]:
    """List the tensors in a list of tensors; nothing if ``value`` is a tensor itself."""
    listed = graph.values[value]
    return () if listed.is_tensor or listed.producer is None else graph.ops[listed.producer].operands


class StepList:
    """Kernels as they are found, one after another; ``bytes`` of each buffer that is scratch memory."""

    def __init__(self, graph: JointGraph) -> None:
        self.bytes: dict[int, int] = {}
        self._graph = graph
        self._steps: list[Step] = []
        self._copies = len(graph.values)
        # Values that are computed in the place of others, by these.
        self._places: dict[int, int] = {}

    def append(self, reads: Iterable[int], writes: Iterable[int]) -> None:
        """Append a kernel."""
        self._steps.append(Step(tuple(reads), tuple(writes)))

    def copy(self, value: int, times: int = 1) -> int:
        """A buffer that is so many times as large as ``value``."""
        number = self._copies
        self._copies += 1
        self.bytes[number] = times * self._graph.values[value].bytes
        return number

    def add_coordinates(self, op: Op, sources: Sequence[tuple[int, ...]]) -> int:
        """The kernels that make the coordinates of all elements of the scatter ``op``: those along each axis first,
        then all of them side by side, in the buffer that is returned."""
        given = op.operands[INDEX_OPERANDS[op.name]]
        index = max(find_listed(self._graph, given) or (given,), key=lambda value: self._graph.values[value].bytes)
        columns = tuple(self.copy(index) for _ in range(op.parts))
        self.append(sources[given], columns)
        coordinates = self.copy(index, op.parts)
        self.append(columns, (coordinates,))
        return coordinates

    def replace(self, value: int, earlier: int) -> None:
        """Have ``value`` be computed in the place of ``earlier``, which nothing reads after that."""
        self._places[value] = self._places.get(earlier, earlier)

    def finish(self) -> Steps:
        """The steps, each value in the buffer that it is in."""
        return Steps(tuple(Step(self._find(s.reads), self._find(s.writes)) for s in self._steps), self.bytes)

    def _find(self, values: tuple[int, ...]) -> tuple[int, ...]:
        if self._places.keys().isdisjoint(values):
            return values
        return tuple(dict.fromkeys(self._places.get(value, value) for value in values))
