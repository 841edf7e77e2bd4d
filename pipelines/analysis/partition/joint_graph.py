# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A joint function as plain data: what partitioning decides on, with no MLIR, torch or IREE in sight. Values and ops
are numbered in program order. Multi-result ops are flattened: each result is a value of its own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from retrograd.contract.attributes import Tag
from retrograd.pipelines.analysis.partition.op_kinds import FILLS, REORDERS, OpKind

_PARTS = ("torch.aten.select.int", "torch.aten.slice.Tensor", "torch.aten.narrow")
_LIKE = tuple(f"torch.aten.{name}_like" for name in ("empty", "full", "ones", "zeros"))
_LIKE += tuple(f"torch.aten.new_{name}" for name in ("empty", "full", "ones", "zeros"))
# Ops that read one element for each that they give, from a place that another tensor says.
_GATHERS = tuple(f"torch.aten.{n}" for n in ("embedding", "gather", "index.Tensor", "index.Tensor_hacked_twin"))
_SPLITS = ("torch.aten.unbind.int", "torch.aten.split.Tensor", "torch.aten.split_with_sizes", "torch.aten.chunk")


@dataclass(frozen=True)
class Value:
    """An SSA value. ``producer`` is its op's number, ``None`` for an argument; ``bytes`` is 0 where it is no tensor.
    ``stored`` is its size where it is saved in a narrower type."""

    id: int
    name: str
    bytes: int
    producer: int | None
    is_tensor: bool = True
    stored: int | None = None

    @property
    def saved_bytes(self) -> int:
        """Bytes that it takes between forward and backward if it is saved."""
        return self.bytes if self.stored is None else self.stored


@dataclass(frozen=True)
class Op:
    """An operation: name in MLIR, kind, operands and results by value number, floating-point operations.

    ``tag`` is what the user asked of it, ``block`` the number of the checkpointed block that it is in, ``parts`` the
    number of partial sums that a product or a reduction is split into, or of axes that a scatter has coordinates along;
    ``packed`` says whether it reads packed copies of its operands.
    """

    id: int
    name: str
    kind: OpKind
    operands: tuple[int, ...]
    results: tuple[int, ...]
    flops: int = 0
    tag: Tag | None = None
    block: int | None = None
    parts: int = 1
    packed: bool = True


@dataclass(frozen=True)
class JointGraph:
    """A joint forward and backward function.

    ``arguments`` are all its arguments; those in ``tangents`` exist in the backward only, the others in both halves, at
    no cost, but for those in ``mutated``: the step overwrites them, so that the backward finds them only where they
    were saved. ``same`` numbers the ops that do what others do too, were their operands the
    same: equal ones have equal numbers. ``reshaped`` has the values that hold all that another one holds, in its order:
    that one, and the shape it has of it, or ``None`` for the other's own. ``transposed`` has the values that are
    transposes of a matrix, and that matrix.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    arguments: tuple[int, ...]
    tangents: frozenset[int]
    forward_results: tuple[int, ...]
    backward_results: tuple[int, ...]
    mutated: frozenset[int] = frozenset()
    same: Mapping[int, int] = field(default_factory=dict, hash=False)
    reshaped: Mapping[int, tuple[int, Hashable | None]] = field(default_factory=dict, hash=False)
    transposed: Mapping[int, int] = field(default_factory=dict, hash=False)

    def is_fill(self, value: int) -> bool:
        """Whether ``value`` is computed as one number all over."""
        producer = self.values[value].producer
        return producer is not None and self.ops[producer].name in FILLS

    def count_bytes(self, number: int) -> int:
        """Count the bytes of an op's results."""
        return sum(self.values[result].bytes for result in self.ops[number].results)

    def form_of(self, value: int, same: Mapping[int, int] | Sequence[int]) -> tuple[int, Hashable | None]:
        """Return the root and shape that tell ``value`` from those that hold something else or have another shape,
        where ``same`` has for values the one that they are the same as."""
        root, shape = self.reshaped.get(value, (value, None))
        return (same.get(root, root) if isinstance(same, Mapping) else same[root]), shape

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each value the ops that take it, in order."""
        users: list[list[int]] = [[] for _ in self.values]
        for op in self.ops:
            for operand in dict.fromkeys(op.operands):
                users[operand].append(op.id)
        return tuple(tuple(u) for u in users)

    @cached_property
    def free_ops(self) -> frozenset[int]:
        """Ops that no kernel runs: constants and views, but for ``copied_views``."""
        free = (op.id for op in self.ops if op.kind in (OpKind.VIEW, OpKind.CONSTANT))
        return frozenset(free) - self.copied_views

    @cached_property
    def tagged_ops(self) -> Mapping[Tag, tuple[Op, ...]]:
        """The ops that carry each tag, in order."""
        found: dict[Tag, list[Op]] = {tag: [] for tag in Tag}
        for op in self.ops:
            if op.tag is not None:
                found[op.tag].append(op)
        return {tag: tuple(ops) for tag, ops in found.items()}

    @cached_property
    def storage(self) -> tuple[tuple[int, ...], ...]:
        """For each value those that hold its data: itself, or through views and lists others; none for constants."""
        return self._find_storage(frozenset())

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """For each op the values that hold the data it takes."""
        return self._find_reads(self.storage)

    @cached_property
    def copied_views(self) -> frozenset[int]:
        """Views that are copies in compiled code: those that reorder the axes of a value of which several parts are
        then taken, as of queries, keys and values that one product gives."""
        views = (op for op in self.ops if op.kind is OpKind.VIEW and op.name in REORDERS)
        return frozenset(op.id for op in views if self._count_parts(op.results[0]) > 1)

    @cached_property
    def buffers(self) -> tuple[tuple[int, ...], ...]:
        """The ``storage`` of each value, where ``copied_views`` have memory of their own."""
        return self._find_storage(self.copied_views)

    @cached_property
    def buffer_reads(self) -> tuple[tuple[int, ...], ...]:
        """For each op the values of ``buffers`` that it reads; what takes only a shape and a type reads nothing."""
        reads = self._find_reads(self.buffers)
        return tuple(() if self.ops[n].name in _LIKE else values for n, values in enumerate(reads))

    @cached_property
    def read_in_parts(self) -> frozenset[int]:
        """The values of ``buffers`` of which an op reads a part, as a slice of it."""
        parts: set[int] = set()
        for op in self.ops:
            if op.kind is OpKind.VIEW and (op.operands[0] in parts or self._takes_part(op)):
                parts.update(op.results)
        reads = {v for op in self.ops if op.kind is not OpKind.VIEW for v in op.operands if v in parts}
        return frozenset(source for v in reads for source in self.buffers[v])

    @cached_property
    def fusible_ops(self) -> frozenset[int]:
        """Pointwise ops and gathers, none of whose results an op reads a part of."""
        ops = (op for op in self.ops if op.kind is OpKind.POINTWISE or op.name in _GATHERS)
        return frozenset(op.id for op in ops if self.read_in_parts.isdisjoint(op.results))

    def _takes_part(self, op: Op) -> bool:
        smaller = self.values[op.results[0]].bytes < self.values[op.operands[0]].bytes
        return op.name in _SPLITS or (op.name in _PARTS and smaller)

    @cached_property
    def buffer_views(self) -> Mapping[int, tuple[int, ...]]:
        """For each value of ``buffers`` the others whose data it holds."""
        pairs = ((source, v) for v, held in enumerate(self.buffers) for source in held if source != v)
        return _group(pairs)

    @cached_property
    def buffer_readers(self) -> Mapping[int, tuple[int, ...]]:
        """For each value of ``buffers`` the ops that read it, in order."""
        return _group((value, op) for op, values in enumerate(self.buffer_reads) for value in values)

    def _find_storage(self, copied: frozenset[int]) -> tuple[tuple[int, ...], ...]:
        found: list[tuple[int, ...]] = [(v.id,) for v in self.values]
        for op in self.ops:
            if op.kind in (OpKind.VIEW, OpKind.CONSTANT) and op.id not in copied:
                taken = op.operands[:1] if op.kind is OpKind.VIEW else op.operands
                held = tuple(dict.fromkeys(s for v in taken for s in found[v]))
                for result in op.results:
                    found[result] = held
        return tuple(found)

    def _find_reads(self, storage: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(dict.fromkeys(s for v in op.operands for s in storage[v])) for op in self.ops)

    def _count_parts(self, value: int) -> int:
        """How many parts are taken of ``value``, itself or through views; 2 stands for any more than one."""
        parts = 0
        for op in (self.ops[user] for user in self.users[value]):
            if op.name in _SPLITS:
                return 2
            if op.kind is OpKind.VIEW:
                parts += 1 if op.name in _PARTS else self._count_parts(op.results[0])
        return min(parts, 2)

    @cached_property
    def forward_ops(self) -> frozenset[int]:
        """Ops that the forward's results need."""
        return self.required_ops(self.forward_results, ())

    @cached_property
    def backward_ops(self) -> frozenset[int]:
        """Ops that the backward's results need, with nothing but the arguments at hand."""
        return self.required_ops(self.backward_results, ())

    @cached_property
    def tangent_ops(self) -> frozenset[int]:
        """Ops that depend on a tangent: they can run in the backward only."""
        reached = set(self.tangents)
        found = set()
        for op in self.ops:
            if not reached.isdisjoint(op.operands):
                found.add(op.id)
                reached.update(op.results)
        return frozenset(found)

    @cached_property
    def late_ops(self) -> frozenset[int]:
        """Ops of the backward that depend on a tangent: every backward runs them."""
        return self.tangent_ops & self.backward_ops

    @cached_property
    def early_needs(self) -> tuple[int, ...]:
        """Values that depend on no tangent and that every backward takes or returns."""
        late = {r for op in self.tangent_ops for r in self.ops[op].results} | self.tangents
        taken = (o for op in sorted(self.late_ops) for o in self.ops[op].operands)
        return tuple(v for v in dict.fromkeys((*taken, *self.backward_results)) if v not in late)

    @cached_property
    def forward_values(self) -> frozenset[int]:
        """The results of ``forward_ops``."""
        return frozenset(r for op in self.forward_ops for r in self.ops[op].results)

    def required_ops(self, results: Iterable[int], available: Iterable[int]) -> frozenset[int]:
        """Ops that must run to give ``results`` when the values of ``available`` are at hand."""
        values, ops = self.values, self.ops
        # Values that are at hand, and those that were seen.
        stop = set(available)
        needed: set[int] = set()
        pending = [r for r in results if r not in stop]
        while pending:
            producer = values[pending.pop()].producer
            if producer is None or producer in needed:
                continue
            needed.add(producer)
            for operand in ops[producer].operands:
                if operand not in stop:
                    stop.add(operand)
                    pending.append(operand)
        return frozenset(needed)

    def view_root(self, value: int) -> int:
        """The value whose storage ``value`` looks at: itself, unless an op of kind VIEW made it."""
        while (producer := self.values[value].producer) is not None and self.ops[producer].kind is OpKind.VIEW:
            value = self.ops[producer].operands[0]
        return value


def _group(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return {key: tuple(values) for key, values in found.items()}
