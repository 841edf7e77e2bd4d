# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-fold-widenings``: what widens or spreads a tensor is computed inside the ops that read it."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import take_behind_barrier
from retrograd.pipelines.transforms.helpers.copies import copy_block
from retrograd.pipelines.transforms.helpers.folding import MAX_INPUTS, create_generic, find_maps, fold
from retrograd.pipelines.transforms.helpers.generics import (
    GENERIC,
    ITERATORS,
    MAPS,
    SEGMENTS,
    count_bits,
    count_inputs,
    is_reduced,
    read_maps,
)
from retrograd.pipelines.transforms.helpers.maker import Maker

_PARALLEL = "#linalg.iterator_type<parallel>"
_RESHAPES = ("tensor.collapse_shape", "tensor.expand_shape")
# How much is computed anew by each reader. Of a chain of ops that all read narrow tensors, each one would otherwise
# compute all before it, and those that it reads in two ways twice: drivers load no kernel with more than 16 buffers.
MAX_OPS = 32


class BwdFoldWidenings(ModulePass):
    """Computes an elementwise op whose result has wider elements than what it reads, or the same ones more often,
    inside the body of each ``linalg.generic`` that reads it.

    IREE copies such ops into the kernels of their uses, as ops of their own. On a GPU each thread then computes a part
    of the tensor, into memory that the threads of a workgroup share. Some kernels, such as a sum down the columns of a
    few rows, then read the parts of other threads without having waited for them. Inside the body that reads it, a
    thread computes what it reads.

    Where another shape of a widened tensor is read, the narrow one is given that shape, and widened after. A use that
    alone says how far a loop of its reader goes reads from behind a barrier, what was computed in a kernel of its own;
    so does one of more than a body should hold.
    """

    description = "Compute what widens or spreads a tensor inside the ops that read it"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for view in list(only_block(func, self.name).operations):
                op = view.operation
                if op.name == GENERIC:
                    fold_operands(op)
                elif op.name in _RESHAPES and is_copied(op.operands[0]) and is_unary(op.operands[0].owner):
                    widen_after(op)


def fold_operands(reader: ir.Operation) -> None:
    """Fold into a ``linalg.generic`` all that it reads of what IREE would copy into its kernel."""
    number = 0
    while number < count_inputs(reader):
        value = reader.operands[number]
        if not is_copied(value):
            number += 1
        elif not is_small(value.owner, reader) or (maps := find_maps(reader, number)) is None:
            reader.operands[number] = take_behind_barrier(value, reader)
        else:
            # What the folded op reads was folded into that before, and is no such op.
            reader = fold(reader, number, maps)
            if not list(value.uses):
                value.owner.erase()


def is_small(source: ir.Operation, reader: ir.Operation) -> bool:
    """Whether ``reader`` stays of a bounded size where ``source`` is computed in its body."""
    inputs = count_inputs(source)
    is_narrow = inputs == 1 or count_inputs(reader) - 1 + inputs <= MAX_INPUTS
    return is_narrow and len(source.regions[0].blocks[0].operations) - 1 <= MAX_OPS


def is_unary(op: ir.Operation) -> bool:
    """Whether a ``linalg.generic`` computes each element of its result from that of one tensor at the same place."""
    return count_inputs(op) == 1 and read_maps(op)[0] == read_maps(op)[-1]


def widen_after(reshape: ir.Operation) -> None:
    """Give another shape to what a widening reads, in the place of what it gives."""
    source, make = reshape.operands[0].owner, Maker.before(reshape)
    wide, narrow = ir.RankedTensorType(reshape.results[0].type), ir.RankedTensorType(source.operands[0].type)
    moved = reshape.clone(make.ip)
    moved.operands[0] = source.operands[0]
    moved.results[0].set_type(ir.RankedTensorType.get(wide.shape, narrow.element_type, loc=reshape.location))
    empty = make.empty(wide, make.open_sizes(moved.results[0]))
    identity = ir.AffineMapAttr.get(ir.AffineMap.get_identity(wide.rank))
    attributes = {
        MAPS: ir.ArrayAttr.get([identity, identity]),
        ITERATORS: ir.ArrayAttr.get([ir.Attribute.parse(_PARALLEL)] * wide.rank),
        SEGMENTS: source.attributes[SEGMENTS],
    }
    read = source.regions[0].blocks[0]
    types = [argument.type for argument in read.arguments]
    make = Maker(make.ip, source.location)
    op, block = create_generic([wide], [moved.results[0], empty], attributes, types, make)
    (value,) = copy_block(read, list(block.arguments), ir.InsertionPoint(block))
    Maker(ir.InsertionPoint(block), source.location).op("linalg.yield", [value])
    reshape.results[0].replace_all_uses_with(op.results[0])
    reshape.erase()
    if not list(source.results[0].uses):
        source.erase()


def is_copied(value: ir.Value) -> bool:
    """Whether IREE copies the op that gives ``value`` into kernels that read it, for widening or spreading its input:
    elementwise, with one result in the order of its loops and without functions that take long. Of inputs of the same
    rank the widest counts: what selects by a mask among tensors as wide as its result widens nothing."""
    if not isinstance(value, ir.OpResult) or value.owner.name != GENERIC:
        return False
    op = value.owner
    inputs, maps = count_inputs(op), read_maps(op)
    if inputs == 0 or len(op.operands) != inputs + 1 or any(is_reduced(op)):
        return False
    *body, _ = (view.operation for view in op.regions[0].blocks[0].operations)
    if maps[-1] != ir.AffineMap.get_identity(maps[-1].n_dims) or list(op.regions[0].blocks[0].arguments[-1].uses):
        return False
    if any(not inner.name.startswith("arith.") for inner in body):
        return False
    types = [ir.RankedTensorType(operand.type) for operand in list(op.operands)[:inputs]]
    rank = max(type_.rank for type_ in types)
    widest = max(count_bits(type_.element_type) for type_ in types if type_.rank == rank)
    is_widening = widest < count_bits(ir.RankedTensorType(value.type).element_type)
    return is_widening or (inputs == 1 and not body)
