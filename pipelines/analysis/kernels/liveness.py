# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The peak of live bytes of a partition plan, over the schedule that will run.

Counted: results, residuals, gradients, and scratch memory of each half. Parameters and inputs are not. All results of a
function have their storage before it runs; autograd frees residuals when the backward returns, so that they are alive
all through it. Scratch memory follows the kernels that ``fusion`` predicts; adjacent kernels that do not depend on one
another run at the same time, as IREE schedules them, or, where it is told so (``in_order``), each by itself, with what
the passes for that case change of them (``in_order_kernels``).

IREE gives a function one block of scratch memory, in which it places the buffers first come, first served
(``pack_buffers``): the gaps that stay are part of the prediction.

docs/memory-prediction.md compares it with what IREE allocates. What is left out, and what that does: kernels that
hold both a reduction and what is made with its result, as a softmax over a vocabulary (overestimated); the padding of
packed operands to multiples of 16, which decides where tensors have a few kilobytes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from retrograd.pipelines.analysis.kernels.fusion import find_steps
from retrograd.pipelines.analysis.kernels.in_order_kernels import order_kernels
from retrograd.pipelines.analysis.kernels.kernel_inputs import KernelInputs, find_inputs
from retrograd.pipelines.analysis.kernels.kernel_steps import Step, Steps
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.partition_plan import PartitionPlan

# IREE places every buffer at a multiple of this.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Peak:
    """Bytes: what each half holds for its caller (``*_held``) and needs as scratch memory on top (``*_scratch``)."""

    forward_held: int
    forward_scratch: int
    backward_held: int
    backward_scratch: int

    @property
    def bytes(self) -> int:
        """The peak of the step."""
        return max(self.forward_held + self.forward_scratch, self.backward_held + self.backward_scratch)


def compute_peak(graph: JointGraph, plan: PartitionPlan, *, in_order: bool = False) -> Peak:
    """Live bytes at the worst moment of each half of ``plan``, its ops in the order that the plan has them in.

    The forward's results are taken to be alive through the backward (updated buffers too, which are freed before it: a
    slight overestimate).
    """
    side_by_side, one_by_one = Peaks(graph).compute(plan)
    return one_by_one if in_order else side_by_side


class Peaks:
    """Computes peaks as ``compute_peak`` does, for many plans of one graph. Their forwards mostly run the same ops, and
    what those read is worked out once."""

    def __init__(self, graph: JointGraph) -> None:
        self._graph = graph
        self._primals = [a for a in graph.arguments if a not in graph.tangents]
        self._forward: tuple[tuple[int, ...], KernelInputs] | None = None

    def least(self, plan: PartitionPlan) -> int:
        """The lower of the peaks that ``plan`` has with kernels side by side and in order."""
        return min(peak.bytes for peak in self.compute(plan))

    def compute(self, plan: PartitionPlan) -> tuple[Peak, Peak]:
        """The peaks of ``plan`` with kernels side by side, and with one at a time."""
        graph = self._graph
        held = _bytes(graph, graph.forward_results) + sum(graph.values[v].saved_bytes for v in plan.saved)
        results = (*graph.forward_results, *plan.saved)
        forward = find_steps(graph, plan.forward, self._primals, results, self._find_inputs(plan.forward))
        kept = [a for a in self._primals if a not in graph.mutated]
        given = (*kept, *plan.saved, *graph.tangents)
        backward = find_steps(graph, plan.backward, given, graph.backward_results)
        gradients = _bytes(graph, graph.backward_results)
        ordered = order_kernels(graph, forward, self._primals), order_kernels(graph, backward, given)
        side_by_side, one_by_one = (
            Peak(
                held,
                compute_scratch(first, in_order=in_order),
                held + gradients,
                compute_scratch(second, in_order=in_order),
            )
            for first, second, in_order in ((forward, backward, False), (*ordered, True))
        )
        return side_by_side, one_by_one

    def _find_inputs(self, forward: tuple[int, ...]) -> KernelInputs:
        if self._forward is None or self._forward[0] != forward:
            self._forward = (forward, find_inputs(self._graph, forward, self._primals))
        return self._forward[1]


def compute_floor(graph: JointGraph) -> int:
    """Bytes that the backward of any plan holds at its worst moment, besides what is saved. These are results,
    gradients, and what ops that depend on a tangent hand to one another, one after another."""
    ops = tuple(sorted(graph.tangent_ops & graph.backward_ops))
    late = {r for op in ops for r in graph.ops[op].results}
    formed = find_steps(graph, ops, [v.id for v in graph.values if v.id not in late], graph.backward_results)
    owned = {b: size for b, size in formed.bytes.items() if b in late or b >= len(graph.values)}
    scratch = _peak_of(formed.steps, owned, range(len(formed.steps)))
    return _bytes(graph, (*graph.forward_results, *graph.backward_results)) + scratch


def compute_scratch(formed: Steps, *, in_order: bool = False) -> int:
    """Bytes of the block that holds all scratch buffers of a function; ``in_order``: of kernels that ``order_kernels``
    gave."""
    waves = range(len(formed.steps)) if in_order else find_waves(formed.steps)
    return pack_buffers(_find_lives(formed.steps, formed.bytes, waves))


class Life(NamedTuple):
    """A buffer: its bytes, and the first and last wave in which it is alive."""

    first: int
    last: int
    bytes: int


def pack_buffers(lives: Iterable[Life]) -> int:
    """Bytes of a block that holds ``lives``, in the order in which they begin: each goes where the gap between those
    alive is the smallest that it fits in, or else behind them all.

    Source: ``packStaticSlicesGreedily`` of IREE's ``iree-stream-layout-slices``.
    """
    placed: list[tuple[int, int, int]] = []  # offset, end, last wave; by offset
    block = wave = 0
    for life in lives:
        if life.first != wave:
            wave, placed = life.first, [p for p in placed if p[2] >= life.first]
        start, smallest, end = -1, 0, 0
        for offset, stop, _ in placed:
            gap = offset - end
            if gap >= life.bytes and (start < 0 or gap < smallest):
                start, smallest = end, gap
            if stop > end:
                end = stop
        start = end if start < 0 else start
        insort(placed, (start, start + life.bytes, life.last))
        block = max(block, start + life.bytes)
    return block


def _peak_of(steps: tuple[Step, ...], sizes: dict[int, int], waves: Sequence[int]) -> int:
    return max(find_live_bytes(steps, sizes, waves), default=0)


def find_live_bytes(steps: tuple[Step, ...], sizes: dict[int, int], waves: Sequence[int]) -> list[int]:
    """For each wave the bytes alive, of buffers of these sizes, where each step runs in the wave of its place."""
    change = [0] * (max(waves, default=-1) + 2)
    for life in _find_lives(steps, sizes, waves):
        change[life.first] += life.bytes
        change[life.last + 1] -= life.bytes
    return list(accumulate(change[:-1]))


def _find_lives(steps: tuple[Step, ...], sizes: dict[int, int], waves: Sequence[int]) -> list[Life]:
    """When buffers of these sizes are alive, in the order in which they are written."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for buffer in step.writes:
            first.setdefault(buffer, waves[number])
            last[buffer] = waves[number]
        for buffer in step.reads:
            last[buffer] = waves[number]
    return [
        Life(wave, last[buffer], -(-sizes[buffer] // _ALIGNMENT) * _ALIGNMENT)
        for buffer, wave in first.items()
        if buffer in sizes
    ]


def find_waves(steps: tuple[Step, ...]) -> list[int]:
    """For each step the number of the wave it runs in: from the end, a step joins the wave in front of which it stands
    unless something in it needs its result."""
    waves: list[int] = []
    number = 0
    needed: set[int] = set()
    for step in reversed(steps):
        if not needed.isdisjoint(step.writes):
            number += 1
            needed = set()
        needed.update(step.reads)
        waves.append(number)
    waves.reverse()
    return [number - wave for wave in waves]


def _bytes(graph: JointGraph, values: tuple[int, ...]) -> int:
    return sum(graph.values[v].bytes for v in values)
