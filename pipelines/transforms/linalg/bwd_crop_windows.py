# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-crop-windows``: an op that takes a single window of a tensor reads no more of the tensor than that window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import walk
from retrograd.pipelines.transforms.helpers.generics import GENERIC, count_inputs, read_maps
from retrograd.pipelines.transforms.helpers.slices import read_shape, take_slice


class BwdCropWindows(ModulePass):
    """Cuts a tensor of which a ``linalg.generic`` reads the first window alone, as ``Tensor.unfold`` does where there
    is room for one: elements ``2 * i + j`` of three, where ``i`` is 0 and ``j`` below 2.

    IREE drops loops of one step. What is left says that ``j`` runs over the whole axis, so that sizes contradict each
    other: with its check of the IR IREE refuses that, and without it writes all of the axis to memory for a part.
    (``FoldUnitExtentDims``, 3.13, on all devices.)
    """

    description = "Cut tensors of which an op reads a single window to that window"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for op in [op for op in walk(only_block(func, self.name)) if op.name == GENERIC]:
                for number in range(count_inputs(op)):
                    crop(op, number)


def crop(op: ir.Operation, number: int) -> None:
    """Cut an input of ``op`` along the axes of which it reads one window."""
    value = op.operands[number]
    windows = dict(find_windows(read_maps(op)[number], read_steps(op), ir.RankedTensorType(value.type).shape))
    if windows:
        sizes = [windows.get(axis, size) for axis, size in enumerate(read_shape(value, op))]
        op.operands[number] = take_slice(value, [0] * len(sizes), sizes, op)


def read_steps(op: ir.Operation) -> list[int | None]:
    """The steps of each loop of ``op``; ``None`` where no operand that is read by the loop itself says how many."""
    maps = read_maps(op)
    steps: list[int | None] = [None] * maps[0].n_dims
    for value, map_ in zip(op.operands, maps, strict=True):
        type_ = ir.RankedTensorType(value.type) if isinstance(value.type, ir.RankedTensorType) else None
        for axis, expression in enumerate(map_.results):
            if isinstance(expression, ir.AffineDimExpr) and type_ is not None and not type_.is_dynamic_dim(axis):
                steps[expression.position] = type_.shape[axis]
    return steps


def find_windows(map_: ir.AffineMap, steps: Sequence[int | None], shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The axes, of a tensor of this shape, that are read by a sum of loops of which one alone has more than one step,
    and as many elements as that has, if the axis has others."""
    for axis, (whole, left) in enumerate(zip(map_.results, drop_single_steps(map_, steps).results, strict=True)):
        if isinstance(whole, ir.AffineDimExpr) or not isinstance(left, ir.AffineDimExpr):
            continue
        size = steps[left.position]
        if size is not None and size != shape[axis]:
            yield axis, size


def drop_single_steps(map_: ir.AffineMap, steps: Sequence[int | None]) -> ir.AffineMap:
    """The map with 0 for the loops of one step."""
    zero = ir.AffineConstantExpr.get(0)
    loops = [zero if size == 1 else ir.AffineDimExpr.get(loop) for loop, size in enumerate(steps)]
    within = ir.AffineMap.get(map_.n_dims, 0, loops)
    return ir.AffineMap.get(map_.n_dims, 0, [expression.compose(within) for expression in map_.results])
