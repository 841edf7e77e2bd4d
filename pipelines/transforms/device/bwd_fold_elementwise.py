# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-fold-elementwise``: what is made of a tensor by arithmetic is computed inside of all that reads it."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.analysis.kernels.in_order_kernels import LEAST_BYTES, SMALL_PART
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.folding import MAX_INPUTS, find_maps, fold
from retrograd.pipelines.transforms.helpers.generics import (
    GENERIC,
    count_bits,
    count_bytes,
    count_inputs,
    is_arithmetic,
    read_inputs,
)
from retrograd.pipelines.transforms.helpers.uses import only_user
from retrograd.pipelines.transforms.helpers.views import view_root
from retrograd.pipelines.transforms.linalg.bwd_copy_updated import find_updated, reads

# How many operations of a body are done once more by each reader.
_MOST_OPS = 8


class BwdFoldElementwise(ModulePass):
    """Computes a tensor inside of each ``linalg.generic`` that reads it, and not at all by itself, if it is made of
    others element by element, by a few operations of arithmetic, in 32 bits or more; where nothing else reads it, and
    where no more memory is needed for what it is made of, which is alive until the last of them has read it.

    IREE computes what several kernels read in a kernel of its own. In the backward of a layer norm those are two
    tensors as large as its input, the normalized input and the gradient times the weight: each is written once and
    read three times, and both are alive beside what they are made of, which is read later again.

    Roundings to fewer bits than a reader computes with would be lost inside of its body. Open sizes stay as they are.
    """

    description = "Compute what several ops read of a tensor, by arithmetic, inside of each of them"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            fold_all(only_block(func, self.name))


def fold_all(block: ir.Block) -> None:
    """Fold each op of a block that should be, in order: what it reads was folded into it before."""
    ops = [view.operation for view in block.operations]
    for number in range(len(ops)):
        if is_cheap(ops[number]) and is_read_in_bodies(ops[number].results[0], block):
            ops[number] = absorb(ops[number])
            if is_cheap(ops[number]) and takes_no_more_memory(ops[number]):
                fold_into_readers(ops, number)


def is_cheap(op: ir.Operation) -> bool:
    """Whether an op computes a tensor of some size by a few operations of arithmetic, in 32 bits or more."""
    if not is_arithmetic(op):
        return False
    result, size = ir.RankedTensorType(op.results[0].type), count_bytes(op.results[0])
    is_few = len(op.regions[0].blocks[0].operations) - 1 <= _MOST_OPS
    return size is not None and size >= LEAST_BYTES and is_few and _is_wide(result.element_type)


def _is_wide(element: ir.Type) -> bool:
    return isinstance(element, ir.FloatType) and count_bits(element) >= 32


def is_read_in_bodies(value: ir.Value, block: ir.Block) -> bool:
    """Whether several ops of a block read a value, all in bodies that it can be computed in."""
    uses = list(value.uses)
    return len(uses) > 1 and all(
        use.owner.operation.name == GENERIC
        and use.owner.operation.block == block
        and use.operand_number < count_inputs(use.owner.operation)
        and find_maps(use.owner.operation, use.operand_number) is not None
        for use in uses
    )


def absorb(op: ir.Operation) -> ir.Operation:
    """Fold into an op what it alone reads of such ops; IREE has them in one kernel in any case."""
    number = 0
    while number < count_inputs(op):
        value = op.operands[number]
        is_alone = isinstance(value, ir.OpResult) and only_user(value) is not None and is_cheap(value.owner)
        folded = fold_if_small(op, number) if is_alone else None
        number += folded is None
        if folded is not None:
            value.owner.erase()
            op = folded
    return op


def fold_if_small(reader: ir.Operation, number: int) -> ir.Operation | None:
    """Fold into an op what gives an operand of it; returns what takes the place of the op, or ``None`` where that
    would leave a loop without an end, or read too much."""
    maps, inputs = find_maps(reader, number), count_inputs(reader) - 1 + count_inputs(reader.operands[number].owner)
    return None if maps is None or inputs > MAX_INPUTS else fold(reader, number, maps)


def takes_no_more_memory(op: ir.Operation) -> bool:
    """Whether what an op reads needs no more memory, alive until the op's last reader, than the result of the op; and
    is in memory in any case."""
    whole, last = count_bytes(op.results[0]) or 0, find_last_reader(op.results[0], op.block)
    longer = 0
    for value in dict.fromkeys(read_inputs(op)):
        size = count_bytes(value) if isinstance(value.type, ir.RankedTensorType) else 0
        is_made = isinstance(value, ir.OpResult)
        if size is None or (is_made and (only_user(value) is not None or is_updated(value, op))):
            return False
        is_longer = size > whole // SMALL_PART and find_last_reader(value, op.block).is_before_in_block(last)
        longer += size if is_longer else 0
    return longer <= whole


def is_updated(value: ir.Value, reader: ir.Operation) -> bool:
    """Whether anything writes to the storage of a value: ``bwd-copy-updated`` has looked at who reads it besides."""
    return any(find_updated(op) for op in reads(view_root(value), reader))


def find_last_reader(value: ir.Value, block: ir.Block) -> ir.Operation:
    """The last op of a block that reads a value, or in whose regions it is read."""
    readers = []
    for use in value.uses:
        op = use.owner.operation
        while op.block != block:
            op = op.parent.operation
        readers.append(op)
    last = readers[0]
    for op in readers[1:]:
        last = op if last.is_before_in_block(op) else last
    return last


def fold_into_readers(ops: list[ir.Operation], number: int) -> None:
    """Fold an op of a block's into all that read it, which others take the place of in the list; it is erased unless
    one of them would read too much."""
    value, left = ops[number].results[0], 0
    while len(uses := list(value.uses)) > left:
        reader = uses[left].owner.operation
        # The hash of an op is of what it reads, and changes with it: no table of ops lasts.
        place = ops.index(reader, number)
        folded = fold_if_small(reader, uses[left].operand_number)
        left += folded is None
        ops[place] = folded or ops[place]
    if not left:
        ops[number].erase()
