# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Into how many parts what an op writes first is split, as its operands say."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil, prod, sqrt

from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.cpu_products import find_parts
from retrograd.pipelines.analysis.layout.tensor_types import tensor_shape
from retrograd.pipelines.analysis.partition.op_kinds import INDEX_OPERANDS

_LIST = "torch.prim.ListConstruct"
_INTEGER, _NONE = "torch.constant.int", "torch.constant.none"


def count_parts(op: ir.Operation, name: str, operands: Sequence[tuple[int, ...] | None]) -> int:
    """The number of parts into which IREE splits what the op ``name`` on operands of these shapes writes first: partial
    sums of a product or a reduction, coordinates of a scatter along each axis; 1 for any other."""
    if name in INDEX_OPERANDS:
        return count_index_axes(op.operands[INDEX_OPERANDS[name]])
    if name in REDUCTIONS:
        return find_reduction_parts(operands[0] or (), read_axes(op))
    return find_parts(name, operands)


def count_index_axes(index: ir.Value) -> int:
    """Along how many axes an index says places: those of a tensor, or as many as there are tensors in a list."""
    shape, listed = tensor_shape(index.type), _producer(index)
    if shape is not None:
        return len(shape)
    return 1 if listed is None else sum(tensor_shape(v.type) is not None for v in listed.operands)


def read_axes(op: ir.Operation) -> frozenset[int]:
    """The axes that a reduction reduces, which are its second operand; all of them where it has none, and none where
    they are no literals. A tensor of no axis has axis 0 to PyTorch, and none here."""
    rank = len(tensor_shape(op.operands[0].type) or ())
    if not rank:
        return frozenset()
    axes = _producer(op.operands[1]) if len(op.operands) > 1 else None
    if len(op.operands) == 1 or (axes is not None and axes.name == _NONE):
        return frozenset(range(rank))
    if axes is None or axes.name != _LIST:
        return frozenset()
    literals = [p for p in map(_producer, axes.operands) if p is not None and p.name == _INTEGER]
    if len(literals) < len(axes.operands):
        return frozenset()
    return frozenset(int(ir.IntegerAttr(p.attributes["value"]).value) % rank for p in literals)


def _producer(value: ir.Value) -> ir.Operation | None:
    return value.owner if isinstance(value, ir.OpResult) else None


# -- Parts of a reduction ---------------------------------------------------------------------------------------------

# Into how many partial sums IREE splits a reduction over the outermost axis, as of a bias or a batch norm. The parts
# are written to memory by one kernel and added up by the next. Source: ``getOuterReductionSizes`` of IREE's
# ``DispatchCreation/SetSplitReductionSizes.cpp``, whose rule is repeated here.


# Ops that lower to one such reduction, and whose second operand, if they have one, says over which axes.
REDUCTIONS = frozenset(f"torch.aten.{name}" for name in ("sum", "sum.dim_IntList", "mean.dim", "amax", "amin"))

_TARGET = 1024
_LEAST_PART = 4


def find_reduction_parts(shape: Sequence[int], axes: Collection[int]) -> int:
    """The number of parts of each result of a reduction of a tensor of ``shape`` over ``axes`` (not negative); 1 for
    one that is not split: over inner axes alone, or of fewer than 1024 terms."""
    # Axes of size 1 are dropped before.
    loops = [(size, axis in axes) for axis, size in enumerate(shape) if size != 1]
    sizes = [size for size, is_reduced in loops if is_reduced]
    if not sizes or not loops[0][1] or prod(sizes) < _TARGET:
        return 1
    wanted = min(_TARGET, max(_LEAST_PART, ceil(sqrt(prod(sizes)))))
    terms = 1
    for size in reversed(sizes):
        terms *= _find_factor(size, ceil(wanted / terms))
    return prod(sizes) // terms


def _find_factor(size: int, least: int) -> int:
    """The smallest factor of ``size`` that is ``least`` or more; ``size`` itself if there is none."""
    return next((factor for factor in range(least, size + 1) if size % factor == 0), size)
