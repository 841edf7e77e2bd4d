# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Estimates the seconds that it costs to run an op again: by the roofline model, or measured times where there are
some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from retrograd.pipelines.analysis.partition.joint_graph import JointGraph
from retrograd.pipelines.analysis.partition.op_kinds import OpKind


@dataclass(frozen=True)
class Device:
    """The two ceilings of a device: floating-point operations and bytes of memory traffic, each per second."""

    flops: float
    bytes: float


# A core or two of a server; only the ratio decides which ops are cheap to run again.
HOST = Device(flops=1e11, bytes=2e10)


@dataclass(frozen=True)
class CostModel:
    """Seconds for an op: ``measured`` ones by the name of its first result, else the larger of what each ceiling of
    ``device`` says."""

    device: Device = HOST
    measured: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, graph: JointGraph, number: int) -> float:
        """Seconds for one op of ``graph``; constants and views are free."""
        op = graph.ops[number]
        if op.kind in (OpKind.CONSTANT, OpKind.VIEW):
            return 0.0
        name = graph.values[op.results[0]].name if op.results else ""
        if name in self.measured:
            return self.measured[name]
        read = {graph.view_root(v) for v in op.operands}
        moved = sum(graph.values[v].bytes for v in (*sorted(read), *op.results))
        return max(op.flops / self.device.flops, moved / self.device.bytes)

    def total(self, graph: JointGraph, ops: Iterable[int]) -> float:
        """Seconds for ``ops``, one after another."""
        return sum(self.seconds(graph, number) for number in ops)
