# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-bound-indices``: an index that the program computes leads to no memory but the tensor's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.barriers import walk
from retrograd.pipelines.transforms.helpers.copies import copy_form
from retrograd.pipelines.transforms.helpers.fills import PLACES, SCATTER, TENSOR, UPDATES
from retrograd.pipelines.transforms.helpers.maker import Maker
from retrograd.pipelines.transforms.helpers.slices import Number, read_shape
from retrograd.pipelines.transforms.helpers.views import view_root

_GATHER = "tensor.extract"
# What gives numbers that are known while compiling, or sizes.
_KNOWN = ("arith.constant", "linalg.index", "tensor.dim")
_COMPUTED = ("arith.", "affine.")
_UNSIGNED_LESS, _SELECT = 6, "arith.select"


class BwdBoundIndices(ModulePass):
    """Has gathers and scatters whose indices come from data stay within their tensors.

    PyTorch raises where an index is out of range; compiled code has nothing to raise with, and would read and write
    whatever lies beyond the tensor. Here such an index is taken for zero, and what is gathered or scattered by it is
    NaN, and of integers the least one: it is seen in the result, and as an index again it is out of range. The checks
    are a comparison and a selection for each element; indices made of loop counters and sizes alone have none.

    Source: JAX's ``GatherScatterMode.FILL_OR_DROP`` (what is gathered out of bounds is NaN or the least integer).
    """

    description = "Keep gathers and scatters by computed indices within their tensors"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for view in list(only_block(func, self.name).operations):
                top = view.operation
                inner = [op for region in top.regions for block in region.blocks for op in walk(block)]
                for op in (top, *inner):
                    if op.name == _GATHER:
                        bound_gather(op, top)
                    elif op.name == SCATTER:
                        bound_scatter(op)


def bound_gather(gather: ir.Operation, top: ir.Operation) -> None:
    """Have ``gather`` read its first element, and give a mark, where an index from data is out of range. ``top`` is the
    op of the function that it is in, or itself."""
    numbers = [i for i, index in enumerate(gather.operands) if i and is_from_data(index)]
    if not numbers:
        return
    sizes = read_shape(gather.operands[0], top)
    make, bit = Maker.before(gather), ir.IntegerType.get_signless(1)
    inside: ir.Value | None = None
    for number in numbers:
        index, size = gather.operands[number], _as_value(sizes[number - 1], make)
        predicate = {"predicate": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), _UNSIGNED_LESS)}
        fits = make.value("arith.cmpi", [index, size], bit, predicate)
        gather.operands[number] = make.value(_SELECT, [fits, index, make.index(0)], index.type)
        inside = fits if inside is None else make.value("arith.andi", [inside, fits], bit)
    assert inside is not None, "there is an index from data"
    operands = [inside, gather.result, make.constant(find_mark(gather))]
    marked = Maker.after(gather).value(_SELECT, operands, gather.result.type)
    gather.result.replace_all_uses_except(marked, marked.owner.operation)


def bound_scatter(scatter: ir.Operation) -> None:
    """Have ``scatter`` write to index zero where an index is out of range; and a mark, unless its places are an
    argument's.

    Raises:
        PassFailure: it has fewer than three operands.
    """
    if len(scatter.operands) < 3:
        raise PassFailure(
            scatter, "bwd-bound-indices: a scatter of fewer than three operands", "give updates, places and tensor"
        )
    sizes = read_shape(scatter.operands[TENSOR], scatter)
    axes = [*ir.DenseI64ArrayAttr(scatter.attributes["dimension_map"])]
    make = Maker.before(scatter)
    bounds = [_as_value(sizes[axis], make) for axis in axes]
    updates, places = scatter.operands[UPDATES], scatter.operands[PLACES]
    (scatter.operands[PLACES],) = copy_form(ir.Module.parse(write_places(scatter)), [places, *bounds], scatter)
    if isinstance(view_root(places), ir.OpResult):
        form = ir.Module.parse(write_updates(scatter))
        (scatter.operands[UPDATES],) = copy_form(form, [updates, places, *bounds], scatter)


def write_places(scatter: ir.Operation) -> str:
    """A function of places ``[n, depth]`` and the sizes of the indexed axes that gives the places, with zero for what
    is out of range, as text."""
    places = ir.RankedTensorType(scatter.operands[PLACES].type)
    columns, place = range(places.shape[1]), places.element_type
    choice = "\n".join(
        f"%at{j} = arith.constant {j} : index\n%is{j} = arith.cmpi eq, %column, %at{j} : index\n"
        f"%most{j} = arith.select %is{j}, %bound{j}, %{'most' if j > 1 else 'bound'}{j - 1} : index"
        for j in columns[1:]
    )
    most = f"%{'most' if len(columns) > 1 else 'bound'}{columns[-1]}"
    pair = "affine_map<(i, j) -> (i, j)>"
    return f"""
func.func @bounded(%given: {places}, {_write_bounds(columns)}) -> {places} {{
  %zero = arith.constant 0 : {place}
  {_write_empty(places)}
  %safe = linalg.generic {{indexing_maps = [{pair}, {pair}], iterator_types = ["parallel", "parallel"]}}
      ins(%given : {places}) outs(%empty : {places}) {{
  ^bb0(%place: {place}, %unused: {place}):
    %column = linalg.index 1 : index
    {choice}
    %size = arith.index_cast {most} : index to {place}
    %fits = arith.cmpi ult, %place, %size : {place}
    %kept = arith.select %fits, %place, %zero : {place}
    linalg.yield %kept : {place}
  }} -> {places}
  return %safe : {places}
}}
"""


def write_updates(scatter: ir.Operation) -> str:
    """A function of updates, places ``[n, depth]`` and the sizes of the indexed axes that gives the updates, marked
    where a place is out of range, as text."""
    updates, places = (ir.RankedTensorType(scatter.operands[i].type) for i in (UPDATES, PLACES))
    columns, place, element = range(places.shape[1]), places.element_type, updates.element_type
    loops = ", ".join(f"d{axis}" for axis in range(updates.rank))
    own = f"affine_map<({loops}) -> ({loops})>"
    maps = ", ".join([own, *(f"affine_map<({loops}) -> (d0, {j})>" for j in columns), own])
    kinds = ", ".join(['"parallel"'] * updates.rank)
    fits = "\n".join(
        f"%size{j} = arith.index_cast %bound{j} : index to {place}\n"
        f"%fits{j} = arith.cmpi ult, %place{j}, %size{j} : {place}"
        for j in columns
    )
    both = "\n".join(f"%all{j} = arith.andi %{'all' if j > 1 else 'fits'}{j - 1}, %fits{j} : i1" for j in columns[1:])
    inside = f"%{'all' if len(columns) > 1 else 'fits'}{columns[-1]}"
    return f"""
func.func @marked(%given: {updates}, %places: {places}, {_write_bounds(columns)}) -> {updates} {{
  %mark = arith.constant {find_mark(scatter)}
  {_write_empty(updates)}
  %marked = linalg.generic {{indexing_maps = [{maps}], iterator_types = [{kinds}]}}
      ins(%given{", %places" * len(columns)} : {updates}{f", {places}" * len(columns)}) outs(%empty : {updates}) {{
  ^bb0(%update: {element}, {"".join(f"%place{j}: {place}, " for j in columns)}%unused: {element}):
    {fits}
    {both}
    %kept = arith.select {inside}, %update, %mark : {element}
    linalg.yield %kept : {element}
  }} -> {updates}
  return %marked : {updates}
}}
"""


def _write_bounds(columns: Sequence[int]) -> str:
    return ", ".join(f"%bound{j}: index" for j in columns)


def _write_empty(type_: ir.RankedTensorType) -> str:
    """``%empty``, of the type and the sizes of ``%given``, as text."""
    open_ = [axis for axis in range(type_.rank) if type_.is_dynamic_dim(axis)]
    lines = [
        f"%axis{axis} = arith.constant {axis} : index\n%length{axis} = tensor.dim %given, %axis{axis} : {type_}"
        for axis in open_
    ]
    sizes = ", ".join(f"%length{axis}" for axis in open_)
    return "\n".join([*lines, f"%empty = tensor.empty({sizes}) : {type_}"])


def find_mark(op: ir.Operation) -> ir.Attribute:
    """Return what a gather yields, or a scatter writes, for an index out of range: NaN, or the least integer."""
    type_ = op.operands[UPDATES].type
    element = ir.RankedTensorType(type_).element_type
    if isinstance(element, ir.FloatType):
        return ir.FloatAttr.get(element, math.nan, op.location)
    width = ir.IntegerType(element).width
    return ir.IntegerAttr.get(element, -(1 << (width - 1)) if width > 1 else 1)


def is_from_data(index: ir.Value) -> bool:
    """Whether an index is more than loop counters, constants and sizes, put together by arithmetic."""
    seen: set[ir.Value] = set()
    waiting = [index]
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        if not isinstance(value, ir.OpResult):
            return True
        op = value.owner
        if op.name in _KNOWN:
            continue
        if not op.name.startswith(_COMPUTED):
            return True
        waiting.extend(op.operands)
    return False


def _as_value(size: Number, make: Maker) -> ir.Value:
    return make.index(size) if isinstance(size, int) else size
