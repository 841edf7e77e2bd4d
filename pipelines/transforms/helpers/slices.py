# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Parts of tensors, and the indices that say which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from retrograd.dialects import ir
from retrograd.pipelines.transforms.helpers.maker import Maker

_OPEN = ir.ShapedType.get_dynamic_size()
Number: TypeAlias = int | ir.Value
"""An index that is known here, or is an index at run time."""


def take_slice(value: ir.Value, offsets: Sequence[Number], sizes: Sequence[Number], op: ir.Operation) -> ir.Value:
    """Make a slice of ``value`` before ``op``: of each axis a number of indices from an offset on."""
    starts, counts = _split(offsets), _split(sizes)
    attributes = {
        "static_offsets": ir.DenseI64ArrayAttr.get(starts[0]),
        "static_sizes": ir.DenseI64ArrayAttr.get(counts[0]),
        "static_strides": ir.DenseI64ArrayAttr.get([1] * len(offsets)),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, len(starts[1]), len(counts[1]), 0]),
    }
    type_ = ir.RankedTensorType.get(counts[0], ir.RankedTensorType(value.type).element_type, loc=op.location)
    return Maker.before(op).value("tensor.extract_slice", [value, *starts[1], *counts[1]], type_, attributes)


def read_shape(value: ir.Value, op: ir.Operation) -> list[Number]:
    """The size of each axis of ``value``, read before ``op`` where its type leaves it open."""
    make, shape = Maker.before(op), ir.RankedTensorType(value.type).shape
    return [make.size(value, axis) if size == _OPEN else size for axis, size in enumerate(shape)]


def compute_index(name: str, left: ir.Value, right: ir.Value, op: ir.Operation) -> ir.Value:
    """The result of the op called ``name`` on two indices, put before ``op``."""
    return Maker.before(op).value(name, [left, right], ir.IndexType.get())


def _split(numbers: Sequence[Number]) -> tuple[list[int], list[ir.Value]]:
    """The known ones, with MLIR's mark for an open one in the place of each other, and the others."""
    known = [number if isinstance(number, int) else _OPEN for number in numbers]
    return known, [number for number in numbers if not isinstance(number, int)]
