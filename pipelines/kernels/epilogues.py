# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds what a kernel can do to a product before it writes it: add a bias, and round to a narrower type."""

from __future__ import annotations

from dataclasses import dataclass

from retrograd.dialects import ir
from retrograd.pipelines.transforms.helpers.generics import GENERIC, is_elementwise, read_inputs, read_maps
from retrograd.pipelines.transforms.helpers.uses import only_user


@dataclass(frozen=True)
class Epilogue:
    """The op whose result the kernel gives, those ``between`` it and the product (the last first), the type of its
    elements, and the vector that is added to each row. What is ``rounded`` has the digits of the matrices' type, and is
    widened again."""

    op: ir.Operation
    between: tuple[ir.Operation, ...]
    element: ir.Type
    bias: ir.Value | None
    rounded: bool = False


def find_epilogue(product: ir.Operation, *, widens: bool = True) -> Epilogue | None:
    """Find the ops that alone read a product, and can be done in its kernel; ``widens`` says whether that can round to
    the type of the matrices and widen again, as the gradient of a weight is under autocast."""
    found = None
    user = only_user(product.results[0])
    bias = _find_bias(user, product.results[0]) if user is not None else None
    if user is not None and bias is not None:
        found = Epilogue(user, (), ir.F32Type.get(), bias)
        user = only_user(user.results[0])
    if user is not None and _rounds(user):
        element = ir.RankedTensorType(user.results[0].type).element_type
        found = Epilogue(user, (found.op,) if found else (), element, found.bias if found else None)
        is_matrices = element == ir.RankedTensorType(product.operands[0].type).element_type
        user = only_user(user.results[0]) if widens and is_matrices else None
        if user is not None and _converts(user, "arith.extf", ("f32",)):
            found = Epilogue(user, (found.op, *found.between), ir.F32Type.get(), found.bias, rounded=True)
    return found


def _rounds(op: ir.Operation) -> bool:
    """Whether an op rounds each element of what it reads to a type of 16 bits, and does nothing else."""
    return _converts(op, "arith.truncf", ("bf16", "f16"))


def _converts(op: ir.Operation, by: str, elements: tuple[str, ...]) -> bool:
    """Whether an op converts each element of what it reads to one of these types, and does nothing else."""
    if op.name != GENERIC or not is_elementwise(op) or len(op.operands) != 2 or not _reads_in_order(op, 0):
        return False
    element = ir.RankedTensorType(op.results[0].type).element_type
    block = op.regions[0].blocks[0]
    body = [view.operation for view in block.operations]
    return (
        str(element) in elements
        and [inner.name for inner in body] == [by, "linalg.yield"]
        and body[0].operands[0] == block.arguments[0]
        and body[1].operands[0] == body[0].results[0]
    )


def _find_bias(op: ir.Operation, product: ir.Value) -> ir.Value | None:
    """The vector that ``op`` adds to each row of a matrix, if that is all it does."""
    if op.name != GENERIC or not is_elementwise(op) or len(op.operands) != 3:
        return None
    inputs, maps = read_inputs(op), read_maps(op)
    if len(inputs) != 2 or product not in inputs or maps[-1].n_dims != 2 or inputs[0] == inputs[1]:
        return None
    number = 1 - inputs.index(product)
    bias, block = inputs[number], op.regions[0].blocks[0]
    if not _reads_in_order(op, 1 - number) or str(maps[number]) != "(d0, d1) -> (d1)":
        return None
    if str(ir.RankedTensorType(op.results[0].type).element_type) != "f32":
        return None
    *widened, add, end = (view.operation for view in block.operations)
    summand: ir.Value = block.arguments[number]
    if widened:
        if [inner.name for inner in widened] != ["arith.extf"] or widened[0].operands[0] != summand:
            return None
        summand = widened[0].results[0]
    is_sum = add.name == "arith.addf" and set(add.operands) == {summand, block.arguments[1 - number]}
    ends = len(end.operands) == 1 and end.operands[0] == add.results[0] if is_sum else False
    kinds = ("f32", "bf16", "f16")
    return bias if ends and str(ir.RankedTensorType(bias.type).element_type) in kinds else None


def _reads_in_order(op: ir.Operation, number: int) -> bool:
    map_ = read_maps(op)[number]
    return bool(map_ == ir.AffineMap.get_identity(map_.n_dims))
