# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Barriers that IREE does not look across, and the views that a value may be seen through, in linalg on tensors."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.dialects import ir

_BARRIER = "util.optimization_barrier"
# Ops whose result may share storage with their first operand.
_VIEWS = ("tensor.cast", "tensor.collapse_shape", "tensor.expand_shape", "tensor.extract_slice", "tensor.reshape")


def add_barrier(value: ir.Value, before: ir.Operation) -> ir.Value:
    """``value`` behind a barrier that stands right before an op."""
    # An op of IREE's, unknown here: modules that hold it are read with unregistered dialects allowed.
    op = ir.Operation.create(
        _BARRIER, operands=[value], results=[value.type], loc=before.location, ip=ir.InsertionPoint(before)
    )
    return op.results[0]


def view_root(value: ir.Value) -> ir.Value:
    """The value whose storage ``value`` may look at."""
    while isinstance(value, ir.OpResult) and value.owner.name in _VIEWS:
        value = value.owner.operands[0]
    return value


def walk(block: ir.Block) -> Iterator[ir.Operation]:
    """The ops of a block, each followed by those inside of it."""
    for view in block.operations:
        op = view.operation
        yield op
        for region in op.regions:
            for inner in region.blocks:
                yield from walk(inner)
