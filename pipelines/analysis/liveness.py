# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The peak of live bytes of a partition plan, over the schedule that will run.

Counted: results, residuals, gradients, and scratch memory of each half. Parameters and inputs are not. All results of a
function have their storage before it runs; autograd frees residuals when the backward returns, so that they are alive
all through it. Scratch memory follows the kernels that ``fusion`` predicts; adjacent kernels that do not depend on one
another run at the same time, as IREE schedules them.

Against what IREE allocates for the models in ``benchmarks``: within 12% for those of dense layers and attention. Chains
of slices and updates, as an LSTM's backward has, are overestimated (by up to 41%); convolutions, whose copies of
shifted inputs are not modelled, are underestimated (by up to 17%), and so is anything of a few kilobytes, where padding
decides. What is recomputed next to a matrix product is packed for it once more than is modelled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from retrograd.pipelines.analysis.fusion import Step, Steps, find_steps
from retrograd.pipelines.analysis.graph import JointGraph
from retrograd.pipelines.analysis.partition_plan import PartitionPlan

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


def compute_peak(graph: JointGraph, plan: PartitionPlan) -> Peak:
    """Live bytes at the worst moment of each half of ``plan``, its ops in the order that the plan has them in.

    The forward's results are taken to be alive through the backward (updated buffers too, which are freed before it: a
    slight overestimate).
    """
    primals = [a for a in graph.arguments if a not in graph.tangents]
    held = _bytes(graph, graph.forward_results) + sum(graph.values[v].saved_bytes for v in plan.saved)
    forward = find_steps(graph, plan.forward, primals, (*graph.forward_results, *plan.saved))
    kept = [a for a in primals if a not in graph.mutated]
    backward = find_steps(graph, plan.backward, (*kept, *plan.saved, *graph.tangents), graph.backward_results)
    gradients = _bytes(graph, graph.backward_results)
    return Peak(held, compute_scratch(forward), held + gradients, compute_scratch(backward))


def compute_floor(graph: JointGraph) -> int:
    """Bytes that the backward of any plan holds at its worst moment, besides what is saved.

    These are results, gradients, and what ops that depend on a tangent hand to one another, one after another.
    """
    ops = tuple(sorted(graph.tangent_ops & graph.backward_ops))
    late = {r for op in ops for r in graph.ops[op].results}
    formed = find_steps(graph, ops, [v.id for v in graph.values if v.id not in late], graph.backward_results)
    owned = {v: size for v, size in formed.bytes.items() if v in late}
    scratch = _peak_of(formed.steps, owned, range(len(formed.steps)))
    return _bytes(graph, (*graph.forward_results, *graph.backward_results)) + scratch


def compute_scratch(formed: Steps) -> int:
    """The most bytes of scratch buffers that are alive at once."""
    return _peak_of(formed.steps, formed.bytes, find_waves(formed.steps))


def _peak_of(steps: tuple[Step, ...], sizes: dict[int, int], waves: Sequence[int]) -> int:
    return max(find_live_bytes(steps, sizes, waves), default=0)


def find_live_bytes(steps: tuple[Step, ...], sizes: dict[int, int], waves: Sequence[int]) -> list[int]:
    """For each wave the bytes alive, of buffers of these sizes, where each step runs in the wave of its place."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for buffer in step.writes:
            first.setdefault(buffer, waves[number])
            last[buffer] = waves[number]
        for buffer in step.reads:
            last[buffer] = waves[number]
    change = [0] * (max(waves, default=-1) + 2)
    for buffer, size in sizes.items():
        if buffer in first:
            aligned = -(-size // _ALIGNMENT) * _ALIGNMENT
            change[first[buffer]] += aligned
            change[last[buffer] + 1] -= aligned
    return list(accumulate(change[:-1]))


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
