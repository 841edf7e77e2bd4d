# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-pad-products``: batches of products have sizes that tiles divide."""

from __future__ import annotations

import math
from collections.abc import Sequence

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.barriers import walk
from retrograd.pipelines.transforms.helpers.maker import Maker
from retrograd.pipelines.transforms.helpers.slices import compute_index, read_shape, take_slice

_PRODUCT = "linalg.batch_matmul"
_STEP = 16
# Of the types that matrix units multiply, how many terms they add up at a time.
_TERMS = {"bf16": 16, "f16": 16, "f8E4M3FN": 32, "f8E5M2": 32}
# f32 has none, and is padded where so many multiplications are worth the copies.
_MANY = 1 << 24
_MAPS = (
    "[affine_map<(d0, d1, d2, d3) -> (d0, d1, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, d3, d2)>, "
    "affine_map<(d0, d1, d2, d3) -> (d0, d1, d2)>]"
)
_OPEN = ir.ShapedType.get_dynamic_size()


class BwdPadProducts(ModulePass):
    """Fills up the matrices of a ``linalg.batch_matmul`` with zeros, where a size is no multiple of what matrix units
    take at a time, or of 16 in a large one of f32; cuts its result to size.

    IREE has matrix units multiply whole tiles and fills these up itself. Of a batch whose terms lie a row of the matrix
    each it masks columns beyond the end and not rows: it adds up products of what comes after the matrix, which is the
    next of the batch, and for the last one whatever is there. So it does with the tiles that f32 is given
    (``product_tiles.py``), which a batch gets where they divide it.
    """

    description = "Pad the batches of products to sizes that tiles divide, for a GPU"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for op in list(walk(only_block(func, self.name))):
                if op.name == _PRODUCT:
                    pad_product(op)


def pad_product(product: ir.Operation) -> None:
    """Pad the operands of a batch of products and cut its result to size, where it needs that.

    Raises:
        PassFailure: the product reads its operands transposed.
    """
    types = [ir.RankedTensorType(operand.type) for operand in product.operands]
    terms = max(_TERMS.get(str(type_.element_type), 0) for type_ in types[:2])
    if not terms and is_worth_tiles(types):
        terms = _STEP
    steps = ((1, _STEP, terms), (1, terms, _STEP), (1, _STEP, _STEP))
    if not terms or all(map(is_multiple, types, steps)):
        return
    if "indexing_maps" in product.attributes and str(product.attributes["indexing_maps"]) != _MAPS:
        raise PassFailure(product, "bwd-pad-products: operands read transposed", "run it before maps are folded")
    into = product.operands[2]
    operands = [pad(operand, step, product) for operand, step in zip(product.operands, steps, strict=True)]
    attributes = {name: product.attributes[name] for name in product.attributes}
    padded = Maker.before(product).op(_PRODUCT, operands, [operands[2].type], attributes, regions=1)
    product.regions[0].blocks[0].append_to(padded.regions[0])
    product.results[0].replace_all_uses_with(cut_to_size(padded.results[0], into, product))
    product.erase()


def is_worth_tiles(types: Sequence[ir.RankedTensorType]) -> bool:
    """Whether a batch of products, of these operands, is of f32 and fixed sizes, and takes many multiplications."""
    if not all(type_.has_static_shape and isinstance(type_.element_type, ir.F32Type) for type_ in types):
        return False
    return bool(math.prod(types[0].shape) * types[1].shape[-1] >= _MANY)


def is_multiple(type_: ir.RankedTensorType, steps: Sequence[int]) -> bool:
    """Whether each size is known, and a multiple of its step; with a step of 1 any is."""
    sizes = zip(type_.shape, steps, strict=True)
    return all(step == 1 or (size != _OPEN and size % step == 0) for size, step in sizes)


def pad(value: ir.Value, steps: Sequence[int], op: ir.Operation) -> ir.Value:
    """``value`` with zeros behind the end of each axis, up to a multiple of its step; computed before ``op``."""
    type_, location = ir.RankedTensorType(value.type), op.location
    if is_multiple(type_, steps):
        return value
    highs, shape, operands = [], [], []
    for axis, (size, step) in enumerate(zip(type_.shape, steps, strict=True)):
        is_open = size == _OPEN
        shape.append(size if is_open else -(-size // step) * step)
        highs.append(_OPEN if is_open and step > 1 else 0 if is_open else shape[-1] - size)
        if is_open and step > 1:
            operands.append(_missing(value, axis, step, op))
    attributes = {
        "static_low": ir.DenseI64ArrayAttr.get([0] * type_.rank),
        "static_high": ir.DenseI64ArrayAttr.get(highs),
        "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 0, len(operands)]),
    }
    result = ir.RankedTensorType.get(shape, type_.element_type, loc=location)
    padded = Maker.before(op).op("tensor.pad", [value, *operands], [result], attributes, regions=1)
    index = [ir.IndexType.get()] * type_.rank
    block = ir.Block.create_at_start(padded.regions[0], index, [location] * type_.rank)
    inside = Maker(ir.InsertionPoint(block), location)
    inside.op("tensor.yield", [inside.constant(ir.FloatAttr.get(type_.element_type, 0.0, loc=location))])
    return padded.results[0]


def cut_to_size(value: ir.Value, like: ir.Value, op: ir.Operation) -> ir.Value:
    """The beginning of ``value``, of the type and sizes of ``like``; computed before ``op``."""
    if value.type == like.type:
        return value
    return take_slice(value, [0] * ir.RankedTensorType(like.type).rank, read_shape(like, op), op)


def _missing(value: ir.Value, axis: int, step: int, op: ir.Operation) -> ir.Value:
    """How much the size of an axis is short of a multiple of ``step``."""
    make = Maker.before(op)
    size, number = make.size(value, axis), make.index(step)
    steps = compute_index("arith.ceildivsi", size, number, op)
    return compute_index("arith.subi", compute_index("arith.muli", steps, number, op), size, op)
