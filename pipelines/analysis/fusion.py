# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is written to memory when the ops of a function run: an approximation of the kernels that IREE forms.

Views are free. A pointwise op whose only user is pointwise or a reduction runs inside it, and its result takes no
memory; one that takes no tensor (a fill, a range) is repeated in each user. Matrix products read packed copies of their
operands and give a packed result (data tiling); a pointwise op next to a product packs or unpacks on the way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from retrograd.pipelines.analysis.graph import JointGraph
from retrograd.pipelines.analysis.op_kinds import OpKind

_FUSES_PRODUCERS = (OpKind.POINTWISE, OpKind.REDUCTION)
# A kernel takes no more operands than this (``kIreeMaxOperandCount`` in IREE's dispatch creation).
_MOST_OPERANDS = 16
_PACKED = ("torch.aten.mm", "torch.aten.bmm", "torch.aten.addmm", "torch.aten.baddbmm", "torch.aten.matmul")


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


def find_inputs(
    graph: JointGraph, ops: Iterable[int], work: Iterable[int], available: Collection[int]
) -> tuple[Sequence[tuple[int, ...]], Mapping[int, tuple[int, ...]] | Sequence[tuple[int, ...]]]:
    """For each value those that hold its data, and for each op of ``work`` those that it reads from memory, unless it
    computes them itself, where the values of ``available`` have storage of their own."""
    storage = graph.storage
    views = [v for v in available if storage[v] != (v,)]
    if not views:
        return storage, graph.reads
    found = list(storage)
    for view in views:
        found[view] = (view,)
    for op in (graph.ops[number] for number in ops):
        if op.kind in (OpKind.VIEW, OpKind.CONSTANT):
            taken = op.operands[:1] if op.kind is OpKind.VIEW else op.operands
            held = tuple(dict.fromkeys(s for v in taken for s in found[v]))
            for result in op.results:
                if result not in available:
                    found[result] = held
    return found, {n: tuple(dict.fromkeys(s for v in graph.ops[n].operands for s in found[v])) for n in work}


def find_steps(graph: JointGraph, ops: tuple[int, ...], available: Collection[int], kept: Collection[int]) -> Steps:
    """The kernels that run ``ops`` in this order on ``available`` values; ``kept`` ones are written to storage of the
    caller's."""
    return _Former(graph, ops, frozenset(available), frozenset(kept)).form()


class _Former:
    def __init__(
        self, graph: JointGraph, ops: tuple[int, ...], available: frozenset[int], kept: frozenset[int]
    ) -> None:
        self.graph, self.available, self.kept = graph, available, kept
        self.work = [n for n in ops if graph.ops[n].kind not in (OpKind.VIEW, OpKind.CONSTANT)]
        self.sources, self.inputs = find_inputs(graph, ops, self.work, available)
        self.users: dict[int, list[int]] = {}
        for number in self.work:
            for source in self.inputs[number]:
                self.users.setdefault(source, []).append(number)
        # A view that is returned is a copy of what it looks at.
        self.copied = [v for v in sorted(kept) if v not in available and self.sources[v] != (v,)]
        self.steps: list[Step] = []
        self.bytes: dict[int, int] = {}
        self.copies = len(graph.values)

    def only_user(self, value: int) -> int | None:
        users = self.users.get(value, ())
        return users[0] if len(users) == 1 and value not in self.kept and value not in self.available else None

    def is_fused(self, number: int) -> bool:
        op = self.graph.ops[number]
        if op.kind is not OpKind.POINTWISE or not self.kept.isdisjoint(op.results):
            return False
        if not self.inputs[number]:
            return True
        users = [self.only_user(r) for r in op.results]
        return all(u is not None and self.graph.ops[u].kind in _FUSES_PRODUCERS for u in users)

    def form(self) -> Steps:
        # What a kernel reads: its own inputs, and in place of those that are computed in it what these read.
        inside: dict[int, tuple[int, ...]] = {}
        for number in self.work:
            reads = self.inputs[number]
            if not inside.keys().isdisjoint(reads):
                reads = tuple(dict.fromkeys(source for v in reads for source in inside.get(v, (v,))))
            if len(reads) < _MOST_OPERANDS and self.is_fused(number):
                inside.update((r, reads) for r in self.graph.ops[number].results if r not in self.available)
            else:
                self.add(number, reads)
        for view in self.copied:
            self.steps.append(Step(self.sources[view], ()))
        return Steps(tuple(self.steps), self.bytes)

    def add(self, number: int, reads: tuple[int, ...]) -> None:
        op = self.graph.ops[number]
        for result in op.results:
            if result not in self.kept and result not in self.available:
                self.bytes[result] = self.graph.values[result].bytes
        if op.name not in _PACKED:
            self.steps.append(Step(reads, tuple(r for r in op.results if r not in self.available)))
            return
        packed = tuple(self.pack(value) for value in reads)
        (result,) = op.results
        user = self.only_user(result)
        if user is not None and self.graph.ops[user].kind is OpKind.POINTWISE:
            self.steps.append(Step(packed, (result,)))
            return
        raw = self.copy(result)
        self.steps.append(Step(packed, (raw,)))
        self.steps.append(Step((raw,), (result,)))

    def pack(self, value: int) -> int:
        producer = self.graph.values[value].producer
        if producer is not None and self.graph.ops[producer].kind is OpKind.POINTWISE and self.only_user(value):
            return value
        packed = self.copy(value)
        self.steps.append(Step((value,), (packed,)))
        return packed

    def copy(self, value: int) -> int:
        number = self.copies
        self.copies += 1
        self.bytes[number] = self.graph.values[value].bytes
        return number
