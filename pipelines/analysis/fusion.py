# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is written to memory when the ops of a function run: an approximation of the kernels that IREE forms.

Views are free, but for those that ``kernel_inputs`` says are copies; one that is returned is written by the kernel that
makes what it looks at, unless that is more. A pointwise op whose only
user is pointwise or a reduction runs inside it, and its result takes no memory; one that takes no tensor (a fill, a
range) is repeated in each user. A matrix product gives a plain result; one that is large (see ``packed_products``)
reads packed copies of its operands, each written by a kernel of its own. Pointwise ops that alone use a product run in
its kernel, on packed copies of their other operands if its own are packed, unless these come later or are products
themselves. A product that is split (see ``split_products``) reads its operands as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from retrograd.pipelines.analysis.graph import JointGraph, Op
from retrograd.pipelines.analysis.kernel_inputs import find_inputs
from retrograd.pipelines.analysis.op_kinds import OpKind
from retrograd.pipelines.analysis.packed_products import PRODUCTS

_FUSES_PRODUCERS = (OpKind.POINTWISE, OpKind.REDUCTION)
# A kernel takes no more operands than this (``kIreeMaxOperandCount`` in IREE's dispatch creation).
_MOST_OPERANDS = 16
# A copy of a view is written right into its place in what it is joined to.
_COPY, _JOIN = "torch.aten.clone", "torch.aten.cat"


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


def find_steps(graph: JointGraph, ops: tuple[int, ...], available: Collection[int], kept: Collection[int]) -> Steps:
    """The kernels that run ``ops`` in this order on ``available`` values; ``kept`` ones are written to storage of the
    caller's."""
    return _Former(graph, ops, frozenset(available), frozenset(kept)).form()


class _Former:
    def __init__(
        self, graph: JointGraph, ops: tuple[int, ...], available: frozenset[int], kept: frozenset[int]
    ) -> None:
        self.graph, self.available = graph, available
        self.work, self.sources, self.inputs = find_inputs(graph, ops, available)
        self.users: dict[int, list[int]] = {}
        for number in self.work:
            for source in self.inputs[number]:
                self.users.setdefault(source, []).append(number)
        # A view that is returned is written to its storage by the kernel that makes what it looks at; of what is at
        # hand, of several values or of a part of one, it is a copy.
        looks = {v: self.sources[v] for v in sorted(kept) if v not in available and self.sources[v] != (v,)}
        self.copied = [v for v, found in looks.items() if not (available.isdisjoint(found) and self.is_whole(v, found))]
        self.kept = kept.union(*(found for v, found in looks.items() if v not in self.copied))
        self.steps: list[Step] = []
        self.bytes: dict[int, int] = {}
        self.copies = len(graph.values)
        # By what is computed inside of its user's kernel what that reads for it; ops that ran before their turn.
        self.inside: dict[int, tuple[int, ...]] = {}
        self.done: set[int] = set()
        self.places = {number: place for place, number in enumerate(self.work)}

    def is_whole(self, view: int, sources: tuple[int, ...]) -> bool:
        """Whether a view of ``sources`` has all the data of the one value that they are."""
        return len(sources) == 1 and self.graph.values[view].bytes == self.graph.values[sources[0]].bytes

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
        return all(u is not None and self.takes_producer(self.graph.ops[u], op) for u in users)

    def takes_producer(self, user: Op, op: Op) -> bool:
        return user.kind in _FUSES_PRODUCERS or (op.name, user.name) == (_COPY, _JOIN)

    def form(self) -> Steps:
        for place, number in enumerate(self.work):
            op = self.graph.ops[number]
            if number in self.done:
                continue
            reads = self.flat(self.inputs[number])
            if op.name in PRODUCTS:
                self.add_product(place, op, reads)
            elif len(reads) < _MOST_OPERANDS and self.is_fused(number):
                self.inside.update((r, reads) for r in op.results if r not in self.available)
            else:
                self.add(reads, op.results)
        for view in self.copied:
            self.steps.append(Step(self.sources[view], ()))
        return Steps(tuple(self.steps), self.bytes)

    def flat(self, values: Iterable[int]) -> tuple[int, ...]:
        """``values``, and in place of those that are computed inside of the kernel what that reads."""
        return tuple(dict.fromkeys(source for v in values for source in self.inside.get(v, (v,))))

    def add_product(self, place: int, op: Op, reads: tuple[int, ...]) -> None:
        """A matrix product, with the pointwise ops behind it that nothing else feeds and whose other operands are
        there."""
        if op.parts > 1:
            parts = self.copy(op.results[0], op.parts)
            self.steps.append(Step(reads, (parts,)))
            self.add((parts,), op.results)
            return
        take = self.pack if op.packed else self.write
        packed = [take(v) for v in reads]
        results = op.results
        while (user := self.only_user(results[0])) is not None and self.graph.ops[user].kind is OpKind.POINTWISE:
            ahead = {user}
            others = [self.find_reads(v, place, ahead) for v in self.inputs[user] if v != results[0]]
            found = list(dict.fromkeys(v for other in others if other is not None for v in other))
            if None in others or len(packed) + len(found) >= _MOST_OPERANDS or any(map(self.is_product, found)):
                break
            # What is broadcast is not packed; a mask is, which has an eighth of the bytes at the least.
            whole = self.graph.values[results[0]].bytes // 8
            packed += [take(v) if self.graph.values[v].bytes >= whole else v for v in found]
            self.done |= ahead
            results = self.graph.ops[user].results
        self.add(tuple(dict.fromkeys(packed)), results)

    def is_product(self, value: int) -> bool:
        producer = self.graph.values[value].producer
        return producer is not None and self.graph.ops[producer].name in PRODUCTS and value not in self.available

    def find_reads(self, value: int, place: int, ahead: set[int]) -> tuple[int, ...] | None:
        """What a kernel at ``place`` reads for ``value``, and in ``ahead`` the ops that it runs for it before their
        turn; ``None`` if it is made of something that comes later."""
        producer = self.graph.values[value].producer
        if value in self.available or producer is None or self.places[producer] < place:
            return self.flat((value,))
        if self.graph.ops[producer].kind is not OpKind.POINTWISE or self.only_user(value) is None:
            return None
        ahead.add(producer)
        parts = [self.find_reads(v, place, ahead) for v in self.inputs[producer]]
        return None if None in parts else tuple(v for part in parts if part is not None for v in part)

    def add(self, reads: tuple[int, ...], results: tuple[int, ...]) -> None:
        for result in results:
            if result not in self.kept and result not in self.available:
                self.bytes[result] = self.graph.values[result].bytes
        self.steps.append(Step(reads, tuple(r for r in results if r not in self.available)))

    def write(self, value: int) -> int:
        """``value``, in memory, where packing and products take it from."""
        if value in self.inside:
            self.add(self.inside.pop(value), (value,))
        return value

    def pack(self, value: int) -> int:
        packed = self.copy(self.write(value))
        self.steps.append(Step((value,), (packed,)))
        return packed

    def copy(self, value: int, times: int = 1) -> int:
        """A buffer that is so many times as large as ``value``."""
        number = self.copies
        self.copies += 1
        self.bytes[number] = times * self.graph.values[value].bytes
        return number
