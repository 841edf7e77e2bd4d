# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-share-matrices``: a batch of products with one matrix reads it where it lies, not a copy for each product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from retrograd.dialects import ir
from retrograd.pipelines.devices.device_targets import PACKING_MARK
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import walk
from retrograd.pipelines.transforms.helpers.generics import (
    MAPS,
    count_inputs,
    is_elementwise,
    map_of_loops,
    read_maps,
    reads_by,
)
from retrograd.pipelines.transforms.helpers.maker import Maker

_PRODUCT = "linalg.batch_matmul"
_COLLAPSE, _REASSOCIATION = "tensor.collapse_shape", "reassociation"
# By loops: batch, row, column, term. Which of them each matrix has, and which it has if it is the same for all.
_LOOPS = ((0, 1, 3), (0, 3, 2), (0, 1, 2))
_COUNT = 4
_SHARED = ((1, 3), (3, 2))


class BwdShareMatrices(ModulePass):
    """A ``linalg.batch_matmul`` one of whose operands is a matrix repeated along the batch takes the matrix.

    So are the weights of a convolution, which is a product for each image. IREE writes the repeated matrix to memory
    before it multiplies: a copy of the weights for each image, which takes longer than the product if images are small.

    Products whose operands are to be packed stay as they are: IREE packs no operand without a batch of its own.
    bwd-mark-products has to have run.
    """

    description = "Have batches of products with one matrix read it in place of copies of it"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for op in list(walk(only_block(func, self.name))):
                if op.name == _PRODUCT and PACKING_MARK not in op.attributes and is_plain(op):
                    share_matrix(op)


def is_plain(product: ir.Operation) -> bool:
    """Whether a batch of products reads both operands as they are: neither transposed nor shared."""
    return reads_by(product, _LOOPS, _COUNT)


def share_matrix(product: ir.Operation) -> None:
    """Have a batch of products take the matrix that one of its operands repeats, if one does."""
    for number, loops in enumerate(_SHARED):
        matrix = find_repeated(product.operands[number], product)
        if matrix is not None:
            maps = [loops if place == number else other for place, other in enumerate(_LOOPS)]
            product.attributes[MAPS] = ir.ArrayAttr.get([ir.AffineMapAttr.get(map_of_loops(m, _COUNT)) for m in maps])
            product.operands[number] = matrix
            return


def find_repeated(value: ir.Value, op: ir.Operation) -> ir.Value | None:
    """The matrix of which ``value``, a batch of matrices of known sizes, is copies; views of it are made before ``op``.
    ``None`` if it is anything else."""
    type_ = ir.RankedTensorType(value.type)
    if not type_.has_static_shape or not isinstance(value, ir.OpResult):
        return None
    groups = [[axis] for axis in range(type_.rank)]
    copies = value.owner
    if copies.name == _COLLAPSE:
        groups = _read_groups(copies)
        if not isinstance(copies.operands[0], ir.OpResult):
            return None
        copies = copies.operands[0].owner
    if not is_copying(copies) or (found := find_axes(copies, groups)) is None:
        return None
    source = copies.operands[0]
    return source if ir.RankedTensorType(source.type).rank == len(found) else _collapse(source, found, op)


def is_copying(op: ir.Operation) -> bool:
    """Whether an op gives elements of one tensor as they are."""
    return is_elementwise(op) and count_inputs(op) == 1 and len(list(op.regions[0].blocks[0].operations)) == 1


def find_axes(copies: ir.Operation, groups: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """The axes of what ``copies`` reads that are the rows of a matrix, and those that are its columns, where axes of
    its result are the batch, rows and columns by ``groups``; ``None`` if its matrices differ, or are transposed."""
    result = ir.RankedTensorType(copies.results[0].type)
    group_of = {axis: number for number, axes in enumerate(groups) for axis in axes}
    read = list(_read_axes(read_maps(copies)[0]))
    places = [axis for axis in read if axis is not None and result.shape[axis] > 1]
    # Each axis is read in order, the whole of rows and columns, and of the batch none.
    needed = [axis for axis in range(result.rank) if group_of[axis] > 0 and result.shape[axis] > 1]
    if places != needed:
        return None
    found: list[list[int]] = [[], []]
    for axis, loop in enumerate(read):
        found[bool(found[1]) or (loop is not None and group_of[loop] == 2)].append(axis)
    return found if all(found) else None


def _read_axes(reads: ir.AffineMap) -> Iterator[int | None]:
    """For each axis that is read the loop that runs along it; ``None`` for another expression."""
    for expr in reads.results:
        yield expr.position if isinstance(expr, ir.AffineDimExpr) else None


def _read_groups(collapse: ir.Operation) -> list[list[int]]:
    attribute = ir.ArrayAttr(collapse.attributes[_REASSOCIATION])
    return [[ir.IntegerAttr(axis).value for axis in ir.ArrayAttr(group)] for group in attribute]


def _collapse(value: ir.Value, groups: Sequence[Sequence[int]], op: ir.Operation) -> ir.Value:
    type_, index = ir.RankedTensorType(value.type), ir.IntegerType.get_signless(64)
    shape = [1] * len(groups)
    for number, axes in enumerate(groups):
        for axis in axes:
            shape[number] *= type_.shape[axis]
    attribute = ir.ArrayAttr.get([ir.ArrayAttr.get([ir.IntegerAttr.get(index, a) for a in axes]) for axes in groups])
    result = ir.RankedTensorType.get(shape, type_.element_type, loc=op.location)
    return Maker.before(op).value(_COLLAPSE, [value], result, {_REASSOCIATION: attribute})
