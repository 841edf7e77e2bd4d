# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where to cut a step's functions into stages, so that residuals and gradients are in memory while they have to be.

One function holds all that it takes and gives for as long as it runs. In stages, a residual has memory from the stage
of the forward that gives it to the last stage of the backward that takes it, and a gradient from the stage that gives
it. A stage more costs some 10 us, and what crosses its border is written to memory, so that there are no more of them
than the peak asks for.

Residuals that are on the host between the halves leave while the stage behind the one that gives them runs, and come
back while the one in front of the first that takes them does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from retrograd.pipelines.analysis.kernels.fusion import find_steps
from retrograd.pipelines.analysis.kernels.liveness import compute_scratch
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph

# A peak that is this much above the least that any cuts have is as good: fewer stages reach it.
_SLACK = 1.02


@dataclass(frozen=True)
class CutFunction:
    """A function as runs of ops between which it can be cut, in order (``ops``).

    ``freed`` are the arguments that are nobody else's and may be freed after their last use; what else it takes is not
    counted. ``outside`` are bytes that are alive all through it. ``moved`` are results and freed arguments that are on
    the host before and after.
    """

    graph: JointGraph
    ops: tuple[tuple[int, ...], ...]
    freed: frozenset[int] = frozenset()
    outside: int = 0
    moved: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.ops)

    @cached_property
    def whole_peak(self) -> int:
        """The peak of the function in one piece: it holds all that it may free until it returns."""
        return self.peak(0, len(self)) if self.ops else self.outside

    @cached_property
    def least_peak(self) -> int:
        """The peak with all cuts that there can be."""
        alone = [self.peak(part, part + 1) for part in range(len(self))]
        leaving = [self.leaving(part - 1, part) if part else 0 for part in range(len(self))]
        coming = [self.coming(part, part + 1) for part in range(1, len(self))] + [0]
        return max(map(sum, zip(alone, leaving, coming, strict=False)), default=self.outside)

    def leaving(self, first: int, end: int) -> int:
        """Bytes that a stage of these parts gives and that leave while the next one runs, which needs none of them."""
        return self._bytes([v for v in self._given(first, end) if v in self.moved and self._last_uses.get(v, -1) < end])

    def coming(self, first: int, end: int) -> int:
        """Bytes that come back before a stage of these parts, the first to take them, runs."""
        return self._bytes([v for v in self.moved if first <= self._first_uses.get(v, -1) < end])

    def _given(self, first: int, end: int) -> list[int]:
        return [v for part in self.ops[first:end] for op in part for v in self.graph.ops[op].results]

    def peak(self, first: int, end: int) -> int:
        """Bytes alive at the worst moment of a stage of the parts from ``first`` up to ``end``, excluding it; without
        what leaves or comes for its neighbours meanwhile."""
        ops = tuple(op for part in self.ops[first:end] for op in part)
        given = self._given(first, end)
        kept = [v for v in given if v in self._makers and self._outlives(v, end)]
        formed = find_steps(self.graph, ops, self._find_near(ops, set(given)), kept)
        held = self._held_bytes[first] + self.coming(first, end)
        return self.outside + held + self._bytes(kept) + compute_scratch(formed)

    def _find_near(self, ops: Sequence[int], inside: Collection[int]) -> dict[int, None]:
        """The values from outside that ``ops`` take, and those that these are views or lists of: what they run on. (To
        go through all values of a function for each of its parts took a tenth of a ResNet-50's compiling.)"""
        graph = self.graph
        found: dict[int, None] = {}
        pending = [v for op in ops for v in graph.ops[op].operands]
        while pending:
            value = pending.pop()
            if value in found or value in inside:
                continue
            found[value] = None
            producer = graph.values[value].producer
            if producer is not None and producer in graph.free_ops:
                pending.extend(graph.ops[producer].operands)
        return found

    @cached_property
    def _held_bytes(self) -> list[int]:
        """For each part the bytes of all that is in memory when a stage starts that begins with it."""
        change = [0] * (len(self) + 2)
        for value in dict.fromkeys(self._owned):
            made = self._makers.get(value, self._first_uses.get(value, -1) if value in self.moved else -1)
            stays = value in self._results and value not in self.moved
            last = len(self) if stays else self._last_uses.get(value, -1)
            if made < last:
                change[made + 1] += self.graph.values[value].bytes
                change[last + 1] -= self.graph.values[value].bytes
        return list(accumulate(change))

    def _outlives(self, value: int, end: int) -> bool:
        return value in self._results or self._last_uses.get(value, -1) >= end

    def _bytes(self, values: Collection[int]) -> int:
        return sum(self.graph.values[v].bytes for v in dict.fromkeys(values))

    @cached_property
    def _results(self) -> frozenset[int]:
        return frozenset((*self.graph.forward_results, *self.graph.backward_results)) - set(self.graph.arguments)

    @cached_property
    def _owned(self) -> tuple[int, ...]:
        """All values that may be in memory between two parts."""
        tensors = (v for v in self._makers if self.graph.values[v].is_tensor)
        return (*sorted(self.freed), *tensors)

    @cached_property
    def _makers(self) -> dict[int, int]:
        """The part that gives each value, but for views and constants, which each stage has of its own."""
        free = self.graph.free_ops
        return {
            v: number
            for number, part in enumerate(self.ops)
            for op in part
            for v in self.graph.ops[op].results
            if op not in free or v in self._results
        }

    @cached_property
    def _first_uses(self) -> dict[int, int]:
        """The first part that takes each moved argument or a view of it."""
        first: dict[int, int] = {}
        free = self.graph.free_ops
        for number, part in enumerate(self.ops):
            for value in [v for op in part if op not in free for v in self.graph.ops[op].operands]:
                first.setdefault(value, number)
        for view in reversed([op for op in self.graph.ops if op.id in free]):
            found = [first[v] for v in view.results if v in first]
            for operand in view.operands if found else ():
                first[operand] = min(first.get(operand, len(self)), *found)
        return {value: first[value] for value in self.moved & self.freed if value in first}

    @cached_property
    def _last_uses(self) -> dict[int, int]:
        """The last part that takes each value or a view of it."""
        last: dict[int, int] = {}
        for number, part in enumerate(self.ops):
            for op in part:
                last |= dict.fromkeys(self.graph.ops[op].operands, number)
        for view in reversed([op for op in self.graph.ops if op.id in self.graph.free_ops]):
            late = max((last.get(v, -1) for v in view.results), default=-1)
            for operand in view.operands:
                last[operand] = max(last.get(operand, -1), late)
        return last


def find_cuts(functions: Sequence[CutFunction], floor: int = 0, gain: int = 0) -> list[tuple[int, ...]]:
    """For each function of a step the parts in front of which to cut it: the fewest that keep the step within what it
    takes in any case, ``floor`` or the least that any cuts leave; none where they gain fewer than ``gain`` bytes."""
    whole = max((function.whole_peak for function in functions), default=0)
    if whole - floor < max(gain, 1):
        return [()] * len(functions)
    # Where cuts keep kernels from being fused, one piece may take less.
    least = max(min(function.whole_peak, function.least_peak) for function in functions)
    target = max(floor, int(least * _SLACK))
    if whole - target < max(gain, 1):
        return [()] * len(functions)
    return [_as_few(function, target) for function in functions]


def _as_few(function: CutFunction, target: int) -> tuple[int, ...]:
    """Cuts between stages of a peak of ``target`` or less each, as far as a single part allows it: each stage is as
    long as it can be. (Nearly always a part of a stage has no higher peak than that, and these are the fewest.)"""
    if function.whole_peak <= target:
        return ()
    cuts: list[int] = []
    before, start = 0, 0
    while (end := _longest(function, before, start, target)) < len(function):
        cuts.append(end)
        before, start = start, end
    return tuple(cuts)


def _longest(function: CutFunction, before: int, start: int, target: int) -> int:
    """The end of the longest stage from ``start`` on whose peak is ``target`` or less; it has one part at the least.
    With its peak counts what leaves meanwhile from the stage that began at ``before``. That stage's own peak has to
    leave room for what comes for this one, and this one as much for the part behind it."""
    leaving = function.leaving(before, start)
    room = target - function.peak(before, start) if function.moved and start else target

    def is_within(end: int) -> bool:
        peak = function.peak(start, end)
        if leaving + peak > target:
            return False
        next_fits = (
            not function.moved
            or end == len(function)
            or (
                peak + function.coming(end, end + 1) <= target
                and function.leaving(start, end) + function.peak(end, end + 1) <= target
            )
        )
        return next_fits and function.coming(start, end) <= room

    step, fits = 1, start + 1
    while fits + step <= len(function) and is_within(fits + step):
        fits += step
        step *= 2
    while step > 1:
        step //= 2
        if fits + step <= len(function) and is_within(fits + step):
            fits += step
    return fits


def split_behind(order: Sequence[int], lasts: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """``order`` cut behind each of ``lasts``; what comes after the last of them is in its part."""
    parts: list[list[int]] = [[]]
    for number in order:
        if parts[-1] and parts[-1][-1] in lasts:
            parts.append([])
        parts[-1].append(number)
    if len(parts) > 1 and parts[-1][-1] not in lasts:
        tail = parts.pop()
        parts[-1] += tail
    return tuple(tuple(part) for part in parts if part)
