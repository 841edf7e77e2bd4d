# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A joint function as plain data: what partitioning decides on, with no MLIR, torch or IREE in sight.

Values and ops are numbered in program order. Multi-result ops are flattened: each result is a value of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from retrograd.pipelines.analysis.op_kinds import OpKind


class Tag(Enum):
    """What the user asked of an op of the forward. The two in the middle are wishes, which the policy ``budget`` may
    overrule."""

    MUST = "must"  # recomputed, never saved
    PREFER = "prefer"  # recomputed
    AVOID = "avoid"  # not recomputed
    NEVER = "never"  # its results are saved if the backward uses them

    @property
    def recomputes(self) -> bool:
        """Whether it asks for recomputation."""
        return self in (Tag.MUST, Tag.PREFER)


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
    number of partial sums that a matrix product is split into; ``packed`` says whether it reads packed copies of its
    operands.
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
    were saved.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    arguments: tuple[int, ...]
    tangents: frozenset[int]
    forward_results: tuple[int, ...]
    backward_results: tuple[int, ...]
    mutated: frozenset[int] = frozenset()

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each value the ops that take it, in order."""
        users: list[list[int]] = [[] for _ in self.values]
        for op in self.ops:
            for operand in dict.fromkeys(op.operands):
                users[operand].append(op.id)
        return tuple(tuple(u) for u in users)

    @cached_property
    def storage(self) -> tuple[tuple[int, ...], ...]:
        """For each value those that hold its data: itself, or through views and lists others; none for constants."""
        found: list[tuple[int, ...]] = [(v.id,) for v in self.values]
        for op in self.ops:
            if op.kind in (OpKind.VIEW, OpKind.CONSTANT):
                taken = op.operands[:1] if op.kind is OpKind.VIEW else op.operands
                held = tuple(dict.fromkeys(s for v in taken for s in found[v]))
                for result in op.results:
                    found[result] = held
        return tuple(found)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """For each op the values that hold the data it takes."""
        storage = self.storage
        return tuple(tuple(dict.fromkeys(s for v in op.operands for s in storage[v])) for op in self.ops)

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
