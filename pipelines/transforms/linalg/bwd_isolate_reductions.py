# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-isolate-reductions``: a reduction that an elementwise op reads at several places is a kernel by itself."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.element_maps import (
    Computed,
    ElementMap,
    collapse,
    compose,
    drop_unit_axes,
    expand,
    invert,
)
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import hide_all_from_fusion
from retrograd.pipelines.transforms.helpers.generics import GENERIC, is_reduced, read_inputs, read_maps

_ROOTS = ("linalg.", "tm_tensor.")
_FILL, _TRANSPOSE, _BROADCAST = "linalg.fill", "linalg.transpose", "linalg.broadcast"
_EXPAND, _COLLAPSE, _CAST = "tensor.expand_shape", "tensor.collapse_shape", "tensor.cast"

# For an op that IREE may begin a kernel with, the maps by which a tensor's elements are computed from its results.
Reads = dict[ir.Operation, set[ElementMap]]


class BwdIsolateReductions(ModulePass):
    """Hides the result of a reduction from what reads it, where some elementwise op, whatever is computed in between,
    reads it at two places for one element: a value that meets its own transpose, a row's sum beside a column's.

    IREE forms one kernel of a reduction and the elementwise ops behind it, and asks which loop of the reduction each
    loop of theirs is. Where one operand says that it is the first loop and another one that it is the second, it takes
    both answers together: tiles of the kernel are then squares on the diagonal, and nothing else is computed.
    (``mergeComposedMaps`` in IREE's ``LoopMappingUtils.cpp``, 3.13.) On all devices, and without a word.

    Elementwise ops that are read at two places by one op are no danger by themselves: they have a loop for each axis,
    so that the two answers contradict each other and IREE leaves them apart.
    """

    description = "Keep reductions out of the kernels of ops that read them at several places at once"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for op in find_read_twice(only_block(func, self.name)):
                hide_all_from_fusion(op)


def find_read_twice(block: ir.Block) -> list[ir.Operation]:
    """The ops that may begin a kernel, of which an elementwise op in ``block`` reads different elements at once."""
    found = dict[ir.Operation, None]()
    tables = dict[ir.Value, Reads]()
    for view in block.operations:
        op = view.operation
        reads = read_operands(op, tables)
        if reads is not None:
            tables.update(read_results(op, reads))
            found.update(dict.fromkeys(find_at_several_places(reads)))
    return list(found)


def find_at_several_places(reads: Reads) -> list[ir.Operation]:
    """The ops whose value is read by more than one map.

    Two of one form count as one: what they compute may be the same in the end, by however different ways, and IREE
    merges them then. A false alarm takes as much: a row's sum and a column's, of one square matrix.
    """
    together = dict[tuple[str, ...], set[ElementMap]]()
    for op, maps in reads.items():
        together.setdefault(read_form(op), set()).update(maps)
    return [op for op in reads if len(together[read_form(op)]) > 1]


def read_form(op: ir.Operation) -> tuple[str, ...]:
    """The sizes of an op's result but for those that are 1, and the type of its elements."""
    type_ = ir.RankedTensorType(op.results[0].type)
    return (*(str(size) for size in type_.shape if size != 1), str(type_.element_type))


def read_operands(op: ir.Operation, tables: dict[ir.Value, Reads]) -> Reads | None:
    """Map what the elements of an elementwise op, or of a view, are computed from, in terms of the op's loops (of the
    axes of a view's result); ``None`` for any other op."""
    operands = read_element_maps(op)
    if operands is None:
        return None
    reads = Reads()
    for value, map_ in operands:
        for source, maps in tables.get(value, start_of(value)).items():
            reads.setdefault(source, set()).update(compose(inner, map_) for inner in maps)
    return reads


def start_of(value: ir.Value) -> Reads:
    """Return what is known of a value that is no elementwise op's: itself, if a kernel may begin with what computes
    it."""
    op = value.owner if isinstance(value, ir.OpResult) else None
    if op is None or not op.name.startswith(_ROOTS) or op.name == _FILL or read_element_maps(op) is not None:
        return {}
    sizes = ir.RankedTensorType(value.type).shape
    return {op: {tuple(axis for axis, size in enumerate(sizes) if size != 1)}}


def read_element_maps(op: ir.Operation) -> list[tuple[ir.Value, ElementMap]] | None:
    """The tensors that an elementwise op or a view reads, each with the map by which it does."""
    if op.name == GENERIC:
        if any(is_reduced(op)):
            return None
        return [(value, read_affine(map_, value)) for value, map_ in zip(read_inputs(op), read_maps(op), strict=False)]
    if op.name not in (_TRANSPOSE, _BROADCAST, _EXPAND, _COLLAPSE, _CAST):
        return None
    value = op.operands[0]
    sizes = ir.RankedTensorType(value.type).shape
    if op.name in (_EXPAND, _COLLAPSE):
        groups = [[int(axis) for axis in group] for group in ir.ArrayAttr(op.attributes["reassociation"])]
        map_ = expand(groups, ir.RankedTensorType(op.results[0].type).shape) if op.name == _EXPAND else ()
        return [(value, map_ if op.name == _EXPAND else collapse(groups, sizes))]
    if op.name == _CAST:
        return [(value, tuple(range(len(sizes))))]
    if op.name == _TRANSPOSE:
        order = list(ir.DenseI64ArrayAttr(op.attributes["permutation"]))
        return [(value, tuple(order.index(axis) for axis in range(len(order))))]
    added = set(ir.DenseI64ArrayAttr(op.attributes["dimensions"]))
    kept = [axis for axis in range(len(sizes) + len(added)) if axis not in added]
    return [(value, tuple(kept))]


def read_affine(map_: ir.AffineMap, value: ir.Value) -> ElementMap:
    """An indexing map as terms over the loops."""
    type_ = value.type
    sizes = ir.RankedTensorType(type_).shape if isinstance(type_, ir.RankedTensorType) else []
    loops = tuple(range(map_.n_dims))
    terms: list[int | Computed] = [
        expression.position
        if isinstance(expression, ir.AffineDimExpr)
        else Computed(str(expression), () if isinstance(expression, ir.AffineConstantExpr) else loops)
        for expression in map_.results
    ]
    return drop_unit_axes(terms, sizes)


def read_results(op: ir.Operation, reads: Reads) -> Iterator[tuple[ir.Value, Reads]]:
    """For each result of an elementwise op or a view, what its elements are computed from, in terms of its axes. Of a
    result that lacks a loop nothing is known but which ops it comes from: each loop is then a place of its own."""
    if op.name != GENERIC:
        yield op.results[0], reads
        return
    maps = read_maps(op)[len(read_inputs(op)) :]
    for result, map_ in zip(op.results, maps, strict=True):
        axes = invert(read_affine(map_, result), map_.n_dims)
        if axes is None:
            axes = tuple(find_axis(loop, map_) for loop in range(map_.n_dims))
        yield result, {source: {compose(inner, axes) for inner in inners} for source, inners in reads.items()}


def find_axis(loop: int, map_: ir.AffineMap) -> int | Computed:
    """The axis of a result that ``loop`` goes along by ``map_``, or a place that no other loop has."""
    for axis, expression in enumerate(map_.results):
        if isinstance(expression, ir.AffineDimExpr) and expression.position == loop:
            return axis
    return Computed(f"loop{loop}")
