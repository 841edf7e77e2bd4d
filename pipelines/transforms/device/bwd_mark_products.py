# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-mark-products``: how a CPU is to compute matrix products: on packed operands or not, in how many parts."""

from __future__ import annotations

from dataclasses import field
from math import prod

from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.cpu_products import Shape, find_part, repays_packing, repays_packing_turned
from retrograd.pipelines.analysis.layout.cpu_tiles import PeeledTile, TailTile, find_peeled_tile, find_tail_tile
from retrograd.pipelines.devices.device_targets import PACKING_MARK
from retrograd.pipelines.infra.functions import functions
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.barriers import BARRIER, walk
from retrograd.pipelines.transforms.helpers.generics import is_elementwise
from retrograd.pipelines.transforms.helpers.uses import only_user
from retrograd.pipelines.transforms.helpers.views import is_view
from retrograd.pipelines.transforms.helpers.widened import Widened

# How many terms a part of the sum has, for IREE's split reductions.
SPLIT_MARK = "iree_linalg_ext.split_reduction"
# How the kernel of an op is to be computed.
_TILE_MARK = "compilation_info"
_TILE = (
    "#iree_codegen.compilation_info<lowering_config = #iree_cpu.lowering_config<"
    "distribution = [{t.rows}, {t.workgroup_columns}, 0], vector_common_parallel = [{t.rows}, {t.columns}, 0], "
    "vector_reduction = [0, 0, {t.terms}]>, translation_info = "
    "#iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<DoubleTilingExpert>>>"
)
# The same, with what a tile leaves in loops of its own; ``one`` and ``zero`` are of a batch.
_PEELED = (
    "#iree_codegen.compilation_info<lowering_config = #iree_cpu.lowering_config<"
    "cache_parallel = [{one}64, 64, 0], distribution = [{one}64, 64, 0], "
    "vector_common_parallel = [{one}{t.rows}, {t.columns}, 0], vector_reduction = [{zero}0, 0, {t.terms}]>, "
    "translation_info = #iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<DoubleTilingExpert>, "
    "{{enable_loop_peeling}}>>"
)
# What each is for the analysis, which counts in torch's ops.
_PRODUCTS = {"linalg.matmul": "torch.aten.mm", "linalg.batch_matmul": "torch.aten.bmm"}


class BwdMarkProducts(ModulePass):
    """Marks the products whose operands IREE is to pack, if it is told to tile data at all, and says how those are to
    be split that it would split; both are for code for a CPU.

    In a function without a mark IREE packs the operands of every product. Where a product of the module repays packing
    and none of a function does, the barriers at that function's end are marked, of which IREE packs nothing:
    bwd-isolate-arguments has to have run.
    """

    avoid_tails: bool = field(
        default=False, metadata={"help": "give tiles of their own, for vectors of 512 bits, where IREE's are slow"}
    )
    pack_turned: bool = field(
        default=False, metadata={"help": "pack smaller products, too, whose second matrix lies transposed"}
    )

    description = "Mark the matrix products that a CPU is to pack the operands of, or to split"

    def apply(self, module: ir.Operation) -> None:
        ops = {func: [op for b in func.regions[0].blocks for op in walk(b)] for func in functions(module)}
        products = {func: [op for op in found if op.name in _PRODUCTS] for func, found in ops.items()}
        worthy = {func: [op for op in found if self._is_worthy(op)] for func, found in products.items()}
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
                if self.avoid_tails and op not in worthy[func] and (text := _write_tile(op)) is not None:
                    op.attributes[_TILE_MARK] = ir.Attribute.parse(text)

    def _is_worthy(self, product: ir.Operation) -> bool:
        return is_worth_packing(product) or (self.pack_turned and is_worth_packing_turned(product))


def _write_tile(product: ir.Operation) -> str | None:
    if is_repeated(product.results[0]):
        return None
    if (tail := choose_tile(product)) is not None:
        return _TILE.format(t=tail)
    if (peeled := choose_peeled_tile(product)) is None:
        return None
    in_batch = product.name == "linalg.batch_matmul"
    return _PEELED.format(t=peeled, one="1, " if in_batch else "", zero="0, " if in_batch else "")


def is_repeated(value: ir.Value) -> bool:
    """Whether something elementwise has each element of ``value`` several times, as the gradient of one row among many
    has it. IREE computes both in one kernel, of whose loops a tile for the product leaves the others whole: vectors of
    32 x 8 x 32 numbers, which it refuses."""
    pending, seen = [value], set[ir.Operation]()
    while pending:
        value = pending.pop()
        for user in (use.owner for use in value.uses):
            if user in seen or not (is_elementwise(user) or is_view(user)):
                continue
            seen.add(user)
            before, after = (ir.RankedTensorType(v.type) for v in (value, user.results[0]))
            is_known = before.has_static_shape and after.has_static_shape
            if is_known and prod(after.shape) > prod(before.shape):
                return True
            pending.append(user.results[0])
    return False


def choose_peeled_tile(product: ir.Operation) -> PeeledTile | None:
    """The tile of a product in f32 of fixed sizes that is not split."""
    left, right = shapes = _read_operands(product)
    element = ir.RankedTensorType(product.operands[0].type).element_type
    if left is None or right is None or not isinstance(element, ir.F32Type):
        return None
    # IREE takes axes of one element out of an op, and would not know the sizes for the rest.
    if 1 in left + right or find_part(_PRODUCTS[product.name], shapes) is not None:
        return None
    return find_peeled_tile(left[-2], right[-1], left[-1])


def choose_tile(product: ir.Operation) -> TailTile | None:
    """The tile of a ``linalg.matmul`` in f32 whose second matrix lies transposed, where IREE's own leaves a tail."""
    shapes = _read_operands(product)
    element = ir.RankedTensorType(product.operands[0].type).element_type
    if product.name != "linalg.matmul" or not isinstance(element, ir.F32Type) or not is_transposed(product.operands[1]):
        return None
    left, right = shapes
    if left is None or right is None:
        return None
    return find_tail_tile(left[0], right[1], find_part(_PRODUCTS[product.name], shapes) or left[1])


def is_transposed(matrix: ir.Value) -> bool:
    """Whether ``matrix`` is a transposition, seen through views, that nothing else uses: IREE reads what it is of."""
    while isinstance(matrix, ir.OpResult) and only_user(matrix) is not None:
        op = matrix.owner.operation
        if not is_view(op):
            return bool(op.name == "linalg.transpose")
        matrix = op.operands[0]
    return False


def is_worth_packing(product: ir.Operation) -> bool:
    """Whether the operands of a product are to be packed; those of open sizes are."""
    return repays_packing(_PRODUCTS[product.name], _read_operands(product), str(_find_element(product)))


def is_worth_packing_turned(product: ir.Operation) -> bool:
    """Whether the operands of a product in f32 are to be packed since the second one lies transposed."""
    is_plain = product.name == "linalg.matmul" and isinstance(_find_element(product), ir.F32Type)
    return is_plain and is_transposed(product.operands[1]) and repays_packing_turned(_read_operands(product))


def _find_element(product: ir.Operation) -> ir.Type:
    """The type of a product's operands, or that which both were widened from: IREE takes widenings into the product."""
    widened, operands = Widened(), list(product.operands)[:2]
    narrow = {widened.find_element(operand) for operand in operands}
    found = narrow.pop() if len(narrow) == 1 else None
    return ir.RankedTensorType(operands[0].type).element_type if found is None else found


def _read_operands(product: ir.Operation) -> list[Shape]:
    """The shapes of both matrices; ``None`` for open sizes."""
    types = [ir.RankedTensorType(v.type) for v in list(product.operands)[:2]]
    return [tuple(t.shape) if t.has_static_shape else None for t in types]
