# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-mark-products``: how a CPU is to compute matrix products: on packed operands or not, in how many parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retrograd.dialects import ir
from retrograd.pipelines.analysis.packed_products import Shape, repays_packing
from retrograd.pipelines.analysis.split_products import find_part
from retrograd.pipelines.device_targets import PACKING_MARK
from retrograd.pipelines.functions import functions
from retrograd.pipelines.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.barriers import BARRIER, walk

# How many terms a part of the sum has, for IREE's split reductions.
SPLIT_MARK = "iree_linalg_ext.split_reduction"
# What each is for the analysis, which counts in torch's ops.
_PRODUCTS = {"linalg.matmul": "torch.aten.mm", "linalg.batch_matmul": "torch.aten.bmm"}


@dataclass(frozen=True)
class BwdMarkProducts(ModulePass):
    """Marks the products whose operands IREE is to pack, if it is told to tile data at all, and says how those are to
    be split that it would split; both are for code for a CPU.

    In a function without a mark IREE packs the operands of every product. Where a product of the module repays packing
    and none of a function does, the barriers at that function's end are marked, of which IREE packs nothing:
    bwd-isolate-arguments has to have run.
    """

    name: ClassVar[str] = "bwd-mark-products"
    description: ClassVar[str] = "Mark the matrix products that a CPU is to pack the operands of, or to split"

    def apply(self, module: ir.Operation) -> None:
        ops = {func: [op for b in func.regions[0].blocks for op in walk(b)] for func in functions(module)}
        products = {func: [op for op in found if op.name in _PRODUCTS] for func, found in ops.items()}
        worthy = {func: [op for op in found if is_worth_packing(op)] for func, found in products.items()}
        is_packing = any(worthy.values())
        for func, found in products.items():
            marked = worthy[func]
            if is_packing and found and not marked:
                marked = [op for op in ops[func] if op.name == BARRIER]
                if not marked:
                    raise PassFailure(
                        func,
                        "bwd-mark-products: a function with products that repay no packing, and no barrier to mark",
                        "run bwd-isolate-arguments first",
                    )
            for op in marked:
                op.attributes[PACKING_MARK] = ir.UnitAttr.get()
            for op in found:
                if (part := find_part(_PRODUCTS[op.name], _read_operands(op))) is not None:
                    op.attributes[SPLIT_MARK] = ir.ArrayAttr.get([ir.IntegerAttr.get(ir.IndexType.get(), part)])


def is_worth_packing(product: ir.Operation) -> bool:
    """Whether the operands of a product are to be packed; those of open sizes are."""
    element = ir.RankedTensorType(product.operands[0].type).element_type
    return repays_packing(_PRODUCTS[product.name], _read_operands(product), str(element))


def _read_operands(product: ir.Operation) -> list[Shape]:
    """The shapes of both matrices; ``None`` for open sizes."""
    types = [ir.RankedTensorType(v.type) for v in list(product.operands)[:2]]
    return [tuple(t.shape) if t.has_static_shape else None for t in types]
