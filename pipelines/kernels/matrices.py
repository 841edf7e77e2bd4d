# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The operands of products: how they lie in memory, seen through transpositions."""

from __future__ import annotations

from dataclasses import dataclass

from retrograd.contract.trials import Buffer
from retrograd.dialects import ir
from retrograd.pipelines.transforms.helpers.maker import Maker
from retrograd.pipelines.transforms.helpers.views import SLICE, is_view
from retrograd.pipelines.transforms.linalg.bwd_export_results import ALIAS

_TRANSPOSE, _COLLAPSE = "linalg.transpose", "tensor.collapse_shape"
# What puts a value into a larger one, at whatever place.
_INSERTIONS = ("tensor.insert_slice", "tensor.concat")


@dataclass(frozen=True)
class Matrix:
    """A matrix or a batch of them, in rows, of ``shape`` in memory; ``transposed`` where a product reads columns for
    rows. ``collapsed`` says how axes of ``value`` are to be collapsed to those of the batch, if they are not yet."""

    value: ir.Value
    shape: tuple[int, ...]
    transposed: bool
    collapsed: ir.Attribute | None = None

    def place(self, before: ir.Operation) -> ir.Value:
        """The matrix, of its shape, for ops from ``before`` on."""
        if self.collapsed is None:
            return self.value
        element = ir.RankedTensorType(self.value.type).element_type
        type_ = ir.RankedTensorType.get(list(self.shape), element, loc=before.location)
        return Maker.before(before).value(_COLLAPSE, [self.value], type_, {"reassociation": self.collapsed})


def find_matrix(value: ir.Value) -> Matrix:
    """Find the matrix that ``value``, the operand of a product, is the transposition of; else ``value`` itself."""
    shape = tuple(ir.RankedTensorType(value.type).shape)
    if not isinstance(value, ir.OpResult):
        return Matrix(value, shape, False)
    op, turned = value.owner, (*shape[:-2], shape[-1], shape[-2])
    if _swaps_last(op):
        return Matrix(op.operands[0], turned, True)
    if op.name == _COLLAPSE and len(shape) == 3 and isinstance(op.operands[0], ir.OpResult):
        inner = op.operands[0].owner
        # Axes of a batch, collapsed after the matrices were transposed: it could have been before.
        if _swaps_last(inner) and _keeps_matrices(op):
            return Matrix(inner.operands[0], turned, True, op.attributes["reassociation"])
    return Matrix(value, shape, False)


def _swaps_last(op: ir.Operation) -> bool:
    """Whether an op transposes matrices, and nothing else."""
    if op.name != _TRANSPOSE or is_view(op):
        return False
    *batch, last, first = ir.DenseI64ArrayAttr(op.attributes["permutation"])
    rank = len(batch) + 2
    return batch == list(range(rank - 2)) and (last, first) == (rank - 1, rank - 2)


def _keeps_matrices(collapse: ir.Operation) -> bool:
    """Whether it collapses no axis of the matrices."""
    groups = [len(ir.ArrayAttr(group)) for group in ir.ArrayAttr(collapse.attributes["reassociation"])]
    return groups[-2:] == [1, 1]


def find_buffer(value: ir.Value) -> Buffer:
    """Describe the memory that a value takes."""
    return find_typed_buffer(value.type)


def find_typed_buffer(type_: ir.Type) -> Buffer:
    """Describe the memory that values of a type take."""
    type_ = ir.RankedTensorType(type_)
    return Buffer(str(type_.element_type), tuple(type_.shape))


def is_aligned(value: ir.Value) -> bool:
    """Whether a value surely begins at a multiple of 16 bytes: it is no slice that begins elsewhere, nor part of
    another value that it is put into."""
    return _begins_aligned(value) and _ends_alone(value)


def _begins_aligned(value: ir.Value) -> bool:
    while isinstance(value, ir.OpResult):
        op = value.owner
        if op.name == SLICE:
            return False
        if op.name != ALIAS and not is_view(op):
            return True
        value = op.operands[0]
    return True


def _ends_alone(value: ir.Value) -> bool:
    """Whether a value is put into no other one, itself or seen through views."""
    for use in value.uses:
        op = use.owner
        if op.name in _INSERTIONS:
            return False
        if (op.name == ALIAS or is_view(op)) and use.operand_number == 0 and not _ends_alone(op.results[0]):
            return False
    return True
