# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-split-columns``: a product with the columns of all taps of a filter is one for each tap, or some of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from retrograd.dialects import ir
from retrograd.pipelines.analysis.kernels.in_order_kernels import group_parts
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.fills import create_fill, is_zero, read_number
from retrograd.pipelines.transforms.helpers.generics import count_bytes, reads_by
from retrograd.pipelines.transforms.helpers.maker import Maker
from retrograd.pipelines.transforms.helpers.uses import only_user
from retrograd.pipelines.transforms.helpers.views import shares_storage

_PRODUCT, _CONCAT, _TRANSPOSE, _COLLAPSE = "linalg.matmul", "tensor.concat", "linalg.transpose", "tensor.collapse_shape"
# By loops: row, column, term.
_LOOPS = ((0, 2), (2, 1), (0, 1))


class BwdSplitColumns(ModulePass):
    """Splits a ``linalg.matmul`` whose second operand is a transposed ``tensor.concat``, ``[1, taps * C, positions]``
    joined along its middle, into a product for each tensor that is joined, ``[1, C, positions]``. What is joined may
    have more axes, ``[1, taps, C, ...]``, and be collapsed to that.

    This is how the gradient of a convolution's filter is written: the columns of all taps (im2col) are as many times
    the input as there are taps. One after another, each tap's slice is free again before the next one is copied. The
    products give the parts of the gradient, which are joined in place of their operands.
    """

    description = "Compute the gradient of a filter tap by tap, less than all columns in memory"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            block = only_block(func, self.name)
            products = [view.operation for view in block.operations if view.operation.name == _PRODUCT]
            found = [(op, columns) for op in products if (columns := find_columns(op)) is not None]
            most = max((count_bytes(p) or 0 for _, columns in found for p in columns.concat.operands), default=0)
            for op, columns in found:
                pieces = list(columns.concat.operands)
                groups = group_parts([count_bytes(piece) or 0 for piece in pieces], most)
                if len(groups) > 1:
                    split(op, columns, [[pieces[i] for i in group] for group in groups])
            if found:
                erase_unused_views(block)


@dataclass(frozen=True)
class Columns:
    """The ops that make the second operand of a product: tensors joined, collapsed to three axes (``None``: they have
    no more), transposed, and seen as a matrix."""

    concat: ir.Operation
    fold: ir.Operation | None
    transpose: ir.Operation
    collapse: ir.Operation


def find_columns(product: ir.Operation) -> Columns | None:
    """Find the columns, of known sizes, that a ``linalg.matmul`` that starts at zero takes second, if nothing else
    takes them."""
    if product.name != _PRODUCT or not reads_by(product, _LOOPS, 3) or not is_zero(product.operands[2]):
        return None
    found: list[ir.Operation] = []
    value = product.operands[1]
    for names in ((_COLLAPSE,), (_TRANSPOSE,), (_COLLAPSE, _CONCAT)):
        if not isinstance(value, ir.OpResult) or value.owner.name not in names or only_user(value) is None:
            return None
        found.append(value.owner.operation)
        value = found[-1].operands[0]
    collapse, transpose, concat = found
    fold = None
    if concat.name == _COLLAPSE:
        fold = concat
        if not isinstance(value, ir.OpResult) or value.owner.name != _CONCAT or only_user(value) is None:
            return None
        concat = value.owner.operation
    order = list(ir.DenseI64ArrayAttr(transpose.attributes["permutation"]))
    axis = ir.IntegerAttr(concat.attributes["dim"]).value
    is_matrix = is_joined_columns(concat, fold) and order == [0, 2, 1] and axis == 1
    return Columns(concat, fold, transpose, collapse) if is_matrix else None


def is_joined_columns(concat: ir.Operation, fold: ir.Operation | None) -> bool:
    """Whether what is joined along its second axis, and collapsed by ``fold``, is ``[1, taps * C, positions]``."""
    type_ = ir.RankedTensorType((fold or concat).results[0].type)
    if not type_.has_static_shape or type_.rank != 3 or type_.shape[0] != 1:
        return False
    groups = [list(ir.ArrayAttr(group)) for group in ir.ArrayAttr(fold.attributes["reassociation"])] if fold else []
    return not fold or len(groups[0]) == 1


def split(product: ir.Operation, columns: Columns, groups: Iterable[Sequence[ir.Value]]) -> None:
    """Replace ``product`` with one for each group of what is joined, behind what slices, transposes and views it."""
    ip, number = ir.InsertionPoint(product), read_number(product.operands[2])
    parts: list[ir.Value] = []
    _, _, positions = ir.RankedTensorType(columns.transpose.operands[0].type).shape
    rows = ir.RankedTensorType(product.results[0].type).shape[0]
    for group in groups:
        flat = join(columns.concat, [copy_views(piece, ip) for piece in group], ip)
        depth = prod(ir.RankedTensorType(flat.type).shape) // positions
        if columns.fold is not None:
            flat = copy(columns.fold, [flat], make_type(columns.fold, [1, depth, positions]), ip)
        turned = make_empty(columns.transpose, [1, positions, depth], ip)
        turned = copy(columns.transpose, [flat, turned], turned.type, ip)
        matrix = make_type(columns.collapse, [positions, depth])
        start = create_fill(number, make_empty(product, [rows, depth], ip), Maker.before(product))
        parts.append(
            copy(product, [product.operands[0], copy(columns.collapse, [turned], matrix, ip), start], start.type, ip)
        )
    product.results[0].replace_all_uses_with(join(columns.concat, parts, ip))
    for op in (product, columns.collapse, columns.transpose, columns.fold, columns.concat):
        if op is not None:
            op.erase()


def join(concat: ir.Operation, parts: Sequence[ir.Value], ip: ir.InsertionPoint) -> ir.Value:
    """``parts``, joined along the second axis as ``concat`` joins what it takes; one alone as it is."""
    if len(parts) == 1:
        return parts[0]
    shapes = [list(ir.RankedTensorType(part.type).shape) for part in parts]
    type_ = make_type(concat, [shapes[0][0], sum(shape[1] for shape in shapes), *shapes[0][2:]])
    return Maker(ip, concat.location).value(_CONCAT, parts, type_, {"dim": concat.attributes["dim"]})


def erase_unused_views(block: ir.Block) -> None:
    """Erase the slices and other views that nothing uses."""
    for view in reversed(list(block.operations)):
        if shares_storage(view.operation) and not list(view.operation.results[0].uses):
            view.operation.erase()


def copy_views(value: ir.Value, ip: ir.InsertionPoint) -> ir.Value:
    """``value``, and what it is a slice or another view of, made again at ``ip``: right in front of its only use."""
    if not isinstance(value, ir.OpResult) or not shares_storage(value.owner.operation):
        return value
    op = value.owner.operation
    return copy(op, [copy_views(op.operands[0], ip), *list(op.operands)[1:]], value.type, ip)


def copy(op: ir.Operation, operands: Sequence[ir.Value], type_: ir.Type, ip: ir.InsertionPoint) -> ir.Value:
    """The result of a copy of ``op`` that takes ``operands`` and gives a ``type_``."""
    made = op.clone(ip=ip)
    for number, operand in enumerate(operands):
        made.operands[number] = operand
    made.results[0].set_type(type_)
    return made.results[0]


def make_type(like: ir.Operation, shape: Sequence[int]) -> ir.RankedTensorType:
    """A tensor of that shape, of the elements that ``like`` gives."""
    element = ir.RankedTensorType(like.results[0].type).element_type
    return ir.RankedTensorType.get(shape, element, loc=like.location)


def make_empty(like: ir.Operation, shape: Sequence[int], ip: ir.InsertionPoint) -> ir.Value:
    """Storage for a tensor of that shape, of the elements that ``like`` gives."""
    return Maker(ip, like.location).empty(make_type(like, shape))
