# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-uncontract-sums``: sums of products that IREE does not compute as contractions."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.generics import GENERIC, count_inputs, is_elementwise, is_reduced
from retrograd.pipelines.transforms.helpers.maker import Maker
from retrograd.pipelines.transforms.helpers.views import view_root

_SUM, _PRODUCT = "arith.addf", "arith.mulf"


class BwdUncontractSums(ModulePass):
    """Adds a zero to the products that a sum of floats adds up, before it does.

    IREE fuses a product with the sum that reads it, makes one ``vector.contract`` of the two, and of that code which
    takes each number out of its vector. The sum of the squares of 1024 rows of 384 took six times as long as that of
    the numbers, and the sum over the rows five times. With a zero between the two there is no contraction, and neither
    IREE nor LLVM drops the zero, since it turns ``-0.0`` into ``0.0``: the sum, which begins with zero, is the same.

    Products that stay matrices' products, with two operands of their own, are left as they are.
    """

    description = "Keep sums of products from becoming contractions on a CPU"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for view in only_block(func, self.name).operations:
                if (added := find_added(view.operation)) is not None:
                    add_zero(added, view.operation)


def find_added(op: ir.Operation) -> ir.Value | None:
    """The number that a sum of floats adds up, where it is a product: of the sum's own body, or of what it reads."""
    if op.name != GENERIC or len(op.results) != 1 or count_inputs(op) != 1 or not any(is_reduced(op)):
        return None
    body = op.regions[0].blocks[0]
    *_, end = (view.operation for view in body.operations)
    total = end.operands[0].owner
    if not isinstance(end.operands[0], ir.OpResult) or total.name != _SUM or body.arguments[1] not in total.operands:
        return None
    added = next((value for value in total.operands if value != body.arguments[1]), None)
    if added is None:
        return None
    if isinstance(added, ir.OpResult):
        return added if added.owner.name == _PRODUCT else None
    return added if yields_product(view_root(op.operands[0])) else None


def yields_product(value: ir.Value) -> bool:
    """Whether a tensor is what an elementwise op makes by a product, as its last op."""
    if not isinstance(value, ir.OpResult) or not is_elementwise(value.owner):
        return False
    *_, end = (view.operation for view in value.owner.regions[0].blocks[0].operations)
    number = end.operands[0]
    return isinstance(number, ir.OpResult) and number.owner.name == _PRODUCT


def add_zero(added: ir.Value, op: ir.Operation) -> None:
    """Have the sum ``op`` add up ``added + 0.0``."""
    *_, end = (view.operation for view in op.regions[0].blocks[0].operations)
    total = end.operands[0].owner
    make = Maker.before(total)
    whole = make.value(_SUM, [added, make.constant(ir.FloatAttr.get(added.type, 0.0, loc=op.location))], added.type)
    for number, operand in enumerate(total.operands):
        if operand == added:
            total.operands[number] = whole
