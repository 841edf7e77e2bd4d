# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which ops run in one kernel: pointwise ones and gathers in that of their users, if these all run in one.

That one may be a kernel of pointwise ops or of a reduction. It has room for so many operands
(see :func:`find_surplus`); and what a part is taken of is written to memory.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from retrograd.pipelines.analysis.kernels.kernel_inputs import KernelInputs
from retrograd.pipelines.analysis.partition.joint_graph import JointGraph, Op
from retrograd.pipelines.analysis.partition.op_kinds import OpKind

_FUSES_PRODUCERS = (OpKind.POINTWISE, OpKind.REDUCTION)
# A copy of a view is written right into its place in what it is joined to.
_COPY, JOIN, PAD = "torch.aten.clone", "torch.aten.cat", "torch.aten.constant_pad_nd"


def takes_producer(user: Op, op: Op) -> bool:
    """Whether the kernel of ``user`` can compute ``op``, a pointwise one, whose result it takes."""
    return user.kind in _FUSES_PRODUCERS or (op.name, user.name) == (_COPY, JOIN)


class KernelRoots:
    """``roots``: for each op the one whose kernel it runs in, which may be itself. ``held`` are the values that are in
    memory anyway, since they are at hand or somebody's to keep."""

    def __init__(self, graph: JointGraph, taken: KernelInputs, held: frozenset[int]) -> None:
        self.graph, self.inputs, self.users, self.held = graph, taken, taken.users, held
        self.roots: dict[int, int] = {}
        self._assign(taken.work, ())
        members: dict[int, list[int]] = {}
        for number, root in self.roots.items():
            members.setdefault(root, []).append(number)
        for number in reversed(taken.work):
            kernel = members.get(number, ())
            if self.roots[number] == number and len(kernel) > 1:
                self._split(number, kernel[::-1], members)

    def is_repeated(self, number: int) -> bool:
        """Whether an op takes no tensor (a fill, a range): each of its users' kernels computes it again."""
        op = self.graph.ops[number]
        return op.kind is OpKind.POINTWISE and not self.inputs.reads[number] and self.held.isdisjoint(op.results)

    def find_reads(self, kernel: int) -> set[int]:
        """Find the values that an op and those that run in its kernel read from memory."""
        found: set[int] = set()
        pending, seen = [kernel], {kernel}
        while pending:
            for value in self.inputs.reads[pending.pop()]:
                producer = self.graph.values[value].producer
                if producer is None or value in self.held or self.roots.get(producer) != kernel:
                    found.add(value)
                elif producer not in seen:
                    seen.add(producer)
                    pending.append(producer)
        return found

    def _assign(self, ops: Sequence[int], cut: Collection[int]) -> None:
        """Give each of ``ops``, from the last to the first, its root; those of ``cut`` are roots."""
        fusible = self.graph.fusible_ops
        for number in reversed(ops):
            op = self.graph.ops[number]
            self.roots[number] = number
            if number not in fusible or number in cut or not self.held.isdisjoint(op.results):
                continue
            users = [u for r in op.results for u in self.users.get(r, ())]
            found = {self.roots[u] for u in users}
            if len(found) == 1 and all(takes_producer(self.graph.ops[u], op) for u in users):
                self.roots[number] = found.pop()

    def _split(self, root: int, kernel: Sequence[int], members: dict[int, list[int]]) -> None:
        """Make kernels of their own of what the one of ``root``, of the ops ``kernel`` in order, has no room for."""
        # Each op but the root is an operand of another one: most kernels have room, whatever the operands are.
        if sum(len(self.graph.ops[n].operands) for n in kernel) - len(kernel) < ROOM_OF_REDUCTION:
            return
        inside = {r: self._operands(number, root) for number in kernel for r in self.graph.ops[number].results}
        operands = self._operands(root, root)
        room = ROOM_OF_REDUCTION if self.graph.ops[root].kind is OpKind.REDUCTION else ROOM_OF_POINTWISE
        if len({v for taken in (operands, *inside.values()) for v in taken if v not in inside}) <= room:
            return
        for result in self.graph.ops[root].results:
            inside.pop(result)
        shared = {v for v in inside if len(self.users[v]) > 1}
        surplus = find_surplus(operands, room, inside, shared)
        cut = {p for value in surplus if (p := self._producer(value)) is not None}
        self._assign([number for number in kernel if number != root], cut)
        for number in reversed(kernel):
            if number != root:
                members.setdefault(self.roots[number], []).append(number)

    def _operands(self, number: int, root: int) -> tuple[int, ...]:
        """The tensors that an op takes, but for literals and what is repeated: where the kernel of ``root`` computes
        one, that one, and else the view that is taken."""
        return tuple(dict.fromkeys(self._find_operands(self.graph.ops[number].operands, root)))

    def _find_operands(self, values: Iterable[int], root: int) -> Iterable[int]:
        for value in values:
            sources = self.inputs.sources[value]
            if not sources or not self.graph.values[value].bytes:
                continue
            producer = self._producer(sources[0])
            if producer is None or not self.is_repeated(producer):
                yield value if producer is None or self.roots[producer] != root else sources[0]

    def _producer(self, value: int) -> int | None:
        """The op that gives ``value``, if it runs here."""
        producer = self.graph.values[value].producer
        return producer if producer in self.roots and value not in self.held else None


# A kernel takes fewer operands than this. Two views of a buffer are two operands; so is what is written to, and what a
# sum starts at.
# As in the sum of the nine taps of a depthwise convolution: five products are computed inside of the kernel that adds
# up, four are written to memory before it.
# Source: ``kIreeMaxOperandCount`` of IREE's ``DispatchCreation/FusionUtils.h``, and the order in which its elementwise
# fusion meets ops, which sums of 5 to 48 terms show.
_LIMIT = 16
ROOM_OF_POINTWISE, ROOM_OF_REDUCTION = _LIMIT - 2, _LIMIT - 3


def find_surplus(
    operands: Sequence[int], room: int, inside: Mapping[int, Sequence[int]], shared: Container[int]
) -> list[int]:
    """Find the values that a kernel of an op on ``operands`` reads from memory, though it could compute them inside had
    it room for more than ``room`` operands.

    Args:
        operands: values that the op takes.
        room: the most operands that the kernel has.
        inside: of the values that can be computed inside of the kernel the operands of their ops.
        shared: those of them that more than one op takes.
    """
    kernel = _Kernel(room, inside, shared, [])
    kernel = kernel.replace([], operands, [])
    while (larger := kernel.take_next()) is not None:
        kernel = larger
    return [value for value in kernel.operands if value in inside]


@dataclass(frozen=True)
class _Kernel:
    """A kernel that computes ``taken`` of the values of ``inside``, and has ``operands``."""

    room: int
    inside: Mapping[int, Sequence[int]]
    shared: Container[int]
    operands: Sequence[int]
    taken: frozenset[int] = frozenset()

    def take_next(self) -> _Kernel | None:
        """With one more op taken in, and with it those that feed it: of a long sum two additions and one of the terms
        at a time, until there is no room, and then single terms. First what adds no operands; ``None`` if nothing fits.
        """
        fitting: _Kernel | None = None
        for place, value in enumerate(self.operands):
            if value not in self.inside:
                continue
            before, behind = self.operands[:place], self.operands[place + 1 :]
            larger = self.replace(before, self.inside[value], behind, value)
            if len(larger.operands) <= len(self.operands):
                return larger
            if fitting is None and len(larger.operands) <= self.room:
                fitting = larger
        return fitting

    def replace(
        self, before: Sequence[int], values: Sequence[int], behind: Sequence[int], taken: int | None = None
    ) -> _Kernel:
        """With ``values`` as operands between others; what gives them is taken in with ``taken``, if nothing else takes
        it."""
        fused = {v for v in values if v in self.inside and v not in self.shared}
        found = [o for v in values for o in (self.inside[v] if v in fused else (v,))]
        computed = self.taken | fused | (frozenset() if taken is None else {taken})
        operands = [v for v in dict.fromkeys((*before, *found, *behind)) if v not in computed]
        return _Kernel(self.room, self.inside, self.shared, operands, computed)
