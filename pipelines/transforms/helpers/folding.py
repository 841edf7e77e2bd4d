# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Folds an elementwise ``linalg.generic`` into the body of one that reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from retrograd.dialects import ir
from retrograd.pipelines.transforms.helpers.copies import copy_block
from retrograd.pipelines.transforms.helpers.generics import GENERIC, MAPS, SEGMENTS, count_inputs, read_maps
from retrograd.pipelines.transforms.helpers.maker import Maker

# Drivers load no kernel with more than 16 buffers.
MAX_INPUTS = 12


def find_maps(reader: ir.Operation, number: int) -> list[ir.AffineMap] | None:
    """The indexing maps of ``reader`` with an operand's op folded into it; None where these leave a loop without an
    end."""
    maps, folded = read_maps(reader), read_maps(reader.operands[number].owner)[:-1]
    reads = maps[number]
    inner = [ir.AffineMap.get(reads.n_dims, 0, [expr.compose(reads) for expr in map_.results]) for map_ in folded]
    found = [*maps[:number], *inner, *maps[number + 1 :]]
    ends = {expr.position for map_ in found for expr in map_.results if isinstance(expr, ir.AffineDimExpr)}
    return found if len(ends) == reads.n_dims else None


def fold(reader: ir.Operation, number: int, maps: Sequence[ir.AffineMap]) -> ir.Operation:
    """``reader`` with the op that gives operand ``number`` computed in its body; it is erased."""
    source = reader.operands[number].owner
    inputs, count = count_inputs(reader), count_inputs(source)
    given = list(source.operands)[:count]
    operands = [*list(reader.operands)[:number], *given, *list(reader.operands)[number + 1 :]]
    attributes = {name: reader.attributes[name] for name in reader.attributes} | {
        MAPS: ir.ArrayAttr.get([ir.AffineMapAttr.get(m) for m in maps]),
        SEGMENTS: ir.DenseI32ArrayAttr.get([inputs - 1 + count, len(reader.operands) - inputs]),
    }
    old, read = reader.regions[0].blocks[0], source.regions[0].blocks[0]
    types = [a.type for a in old.arguments]
    types[number : number + 1] = [a.type for a in list(read.arguments)[:count]]
    results = [result.type for result in reader.results]
    op, block = create_generic(results, operands, attributes, types, Maker.before(reader))
    arguments = list(block.arguments)
    (value,) = copy_block(read, arguments[number : number + count], ir.InsertionPoint(block))
    new = [*arguments[:number], value, *arguments[number + count :]]
    for argument, replacement in zip(list(old.arguments), new, strict=True):
        argument.replace_all_uses_with(replacement)
    for view in list(old.operations):
        view.operation.detach_from_parent()
        block.append(view)
    for result, replacement in zip(reader.results, op.results, strict=True):
        result.replace_all_uses_with(replacement)
    reader.erase()
    return op


def create_generic(
    results: Sequence[ir.Type],
    operands: Sequence[ir.Value],
    attributes: Mapping[str, ir.Attribute],
    types: Sequence[ir.Type],
    make: Maker,
) -> tuple[ir.Operation, ir.Block]:
    """A ``linalg.generic`` and its body, of arguments of these ``types`` and no ops yet."""
    op = make.op(GENERIC, operands, results, attributes, regions=1)
    return op, ir.Block.create_at_start(op.regions[0], types, [make.location] * len(types))
