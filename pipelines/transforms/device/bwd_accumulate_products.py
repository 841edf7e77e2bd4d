# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-accumulate-products``: batches of products that are added up are added to one another as they are computed."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.devices.device_targets import PACKING_MARK
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.device.bwd_mark_products import SPLIT_MARK
from retrograd.pipelines.transforms.helpers.barriers import hide_from_fusion
from retrograd.pipelines.transforms.helpers.fills import is_zero
from retrograd.pipelines.transforms.helpers.generics import count_inputs, is_elementwise, read_maps

_PRODUCT = "linalg.batch_matmul"


class BwdAccumulateProducts(ModulePass):
    """Where the results of two ``linalg.batch_matmul`` are added up, the later one starts at what the earlier one gave.

    A convolution with a large filter is a product for each row of the filter, and its result their sum. IREE computes
    all of the products first, each into memory of its own and from operands of its own, and adds them up at the end.

    Products whose operands are to be packed, or that are to be split, stay as they are: what they are added to would be
    packed as well. bwd-mark-products has to have run.
    """

    description = "Add up batches of products as they are computed"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            places: dict[ir.Value, int] = {}
            for place, view in enumerate(list(only_block(func, self.name).operations)):
                places.update((result, place) for result in view.operation.results)
                if is_sum(view.operation):
                    accumulate(view.operation, places)


def is_sum(op: ir.Operation) -> bool:
    """Whether an op adds two tensors, element by element."""
    if not is_elementwise(op) or count_inputs(op) != 2 or len({*map(str, read_maps(op))}) > 1:
        return False
    block = op.regions[0].blocks[0]
    body = [view.operation for view in block.operations]
    if [inner.name for inner in body] != ["arith.addf", "linalg.yield"]:
        return False
    return {*body[0].operands} == {*list(block.arguments)[:2]} and list(body[1].operands) == list(body[0].results)


def accumulate(total: ir.Operation, places: dict[ir.Value, int]) -> None:
    """Have the later of the two products that ``total`` adds up start at the other one; nothing where that cannot be.
    ``places`` are those at which the values in front of it are computed."""
    terms = list(total.operands)[:2]
    if not all(isinstance(v, ir.OpResult) and v.owner.name == _PRODUCT and len(list(v.uses)) == 1 for v in terms):
        return
    first, second = (v.owner for v in sorted(terms, key=places.__getitem__))
    if is_zero(second.operands[2]) and not any(m in second.attributes for m in (PACKING_MARK, SPLIT_MARK)):
        # Of what a product starts at IREE would make an addition.
        second.operands[2] = hide_from_fusion(first.results[0], second)
        total.results[0].replace_all_uses_with(second.results[0])
        total.erase()
