# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-stack-joins``: tensors that are joined along an inner axis are computed in their place, without copies."""

from __future__ import annotations

from math import prod

from retrograd.dialects import ir
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.copies import replace_by_forms

_CONCAT = "tensor.concat"


class BwdStackJoins(ModulePass):
    """Joins tensors of one shape along a new outermost axis, and moves that axis to where they were joined.

    IREE computes each tensor in memory of its own and copies it to its rows of the joined one, which for two halves of
    a rotated query took an H100 8 times as long as to compute them. What is joined along the outermost axis lies in
    one piece: IREE computes it there. What reads the whole takes it through the moved axis, in its own kernel.
    """

    description = "Join equal tensors along the outermost axis, where they are computed in their place"

    def apply(self, module: ir.Operation) -> None:
        replace_by_forms(module, self.name, write_stacked)


def write_stacked(op: ir.Operation) -> str | None:
    """A ``tensor.concat`` of equal tensors in the other form; none of another op, or where each lies in one piece."""
    if op.name != _CONCAT or len(op.operands) < 2 or len({operand.type for operand in op.operands}) > 1:
        return None
    piece, axis = ir.RankedTensorType(op.operands[0].type), ir.IntegerAttr(op.attributes["dim"]).value
    if not piece.has_static_shape or prod(piece.shape[:axis]) == 1:
        return None
    count, shape, rank = len(op.operands), list(piece.shape), piece.rank

    def tensor(*sizes: int) -> str:
        return f"tensor<{'x'.join(map(str, sizes))}x{piece.element_type}>"

    one, all_, turned = tensor(1, *shape), tensor(count, *shape), tensor(*shape[:axis], count, *shape[axis:])
    outer = [[0, 1], *([i] for i in range(2, rank + 1))]
    inner = [*([i] for i in range(axis)), [axis, axis + 1], *([i] for i in range(axis + 2, rank + 1))]
    order = [*range(1, axis + 1), 0, *range(axis + 1, rank + 1)]
    names = [f"%piece{i}" for i in range(count)]
    expanded = "\n".join(
        f"  {name}_ = tensor.expand_shape {name} {outer} output_shape {[1, *shape]} : {piece} into {one}"
        for name in names
    )
    return f"""func.func @stacked({", ".join(f"{name}: {piece}" for name in names)}) -> {op.results[0].type} {{
{expanded}
  %all = tensor.concat dim(0) {", ".join(f"{name}_" for name in names)} : ({", ".join([one] * count)}) -> {all_}
  %empty = tensor.empty() : {turned}
  %turned = linalg.transpose ins(%all : {all_}) outs(%empty : {turned}) permutation = {order}
  %joined = tensor.collapse_shape %turned {inner} : {turned} into {op.results[0].type}
  return %joined : {op.results[0].type}
}}"""
