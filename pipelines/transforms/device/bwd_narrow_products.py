# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-narrow-products``: products of widened tensors are products of the narrow ones."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.copies import replace_by_form
from retrograd.pipelines.transforms.helpers.generics import MAPS
from retrograd.pipelines.transforms.helpers.widened import Widened

# Operands 0 and 1 are multiplied and added to operand 2, all of which these attributes say more about.
_PRODUCTS = {"linalg.matmul": (), "linalg.batch_matmul": (), "linalg.conv_2d_nchw_fchw": ("dilations", "strides")}

_FORM = """
func.func @product(%a: {a}, %b: {b}, %total: {total}) -> {total} {{
  %product = {name} {maps} {attributes} ins(%a, %b : {a}, {b}) outs(%total : {total}) -> {total}
  return %product : {total}
}}
"""


class BwdNarrowProducts(ModulePass):
    """Has matrix products and convolutions of two tensors that were widened to f32 from the same type of 16 bits read
    these as they were; what moves, pads or joins the wide ones in between moves the narrow ones.

    The result is the same: such an op widens its operands itself to the type that it adds up in. PyTorch widens what it
    adds a bias to, a linear layer in bfloat16, and the decompositions of convolutions what they multiply. Matrix units
    of a GPU multiply numbers of 16 bits and not f32, and whether a product is for them is decided by the types that it
    reads.
    """

    description = "Have products of widened tensors read the narrow ones, for matrix units"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            widened = Widened()
            for view in list(only_block(func, self.name).operations):
                op = view.operation
                if op.name in _PRODUCTS:
                    narrow(op, widened)
            widened.erase_unread()


def narrow(product: ir.Operation, widened: Widened) -> None:
    """Put a product of the narrow tensors in the place of one of widened ones."""
    operands = list(product.operands)[:2]
    elements = {widened.find_element(operand) for operand in operands}
    total = ir.RankedTensorType(product.operands[2].type)
    if len(elements) != 1 or None in elements or not isinstance(total.element_type, ir.F32Type):
        return
    product.operands[0], product.operands[1] = a, b = [widened.narrow(operand) for operand in operands]
    given = ", ".join(f"{name} = {product.attributes[name]}" for name in _PRODUCTS[product.name])
    maps = f"{MAPS} = {product.attributes[MAPS]}" if MAPS in product.attributes else ""
    types = {"a": a.type, "b": b.type, "total": total}
    text = _FORM.format(name=product.name, maps=maps, attributes=f"{{{given}}}" if given else "", **types)
    replace_by_form(product, ir.Module.parse(text))
