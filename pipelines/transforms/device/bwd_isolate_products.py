# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-isolate-products``: ops that read several tensors are no part of the kernel of a product on packed operands."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.product_kernels import repays_isolation
from retrograd.pipelines.devices.device_targets import PACKING_MARK
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import BARRIER, hide_from_fusion
from retrograd.pipelines.transforms.helpers.fills import read_number
from retrograd.pipelines.transforms.helpers.generics import count_bytes, is_elementwise, read_inputs, read_maps
from retrograd.pipelines.transforms.helpers.uses import only_user, replace_operand
from retrograd.pipelines.transforms.helpers.views import is_view


class BwdIsolateProducts(ModulePass):
    """Puts a barrier behind a product on packed operands where the elementwise ops that take it read as many bytes of
    other tensors as it has, and moves the product to right before them. Products of open sizes stay as they are.

    IREE would compute these ops in the product's kernel, and to that end pack all that they read: the backward of a
    GELU has two more copies of its activations in memory, which take longer to write and read than the product's plain
    result does. bwd-mark-products has to have run.
    """

    description = "Keep elementwise ops that read several tensors out of the kernels of packed products"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for view in list(only_block(func, self.name).operations):
                op = view.operation
                if PACKING_MARK not in op.attributes or op.name == BARRIER:
                    continue
                chain = find_chain(op)
                sizes = [count_bytes(value) for value in (op.results[0], *find_reads(op, chain))]
                if None not in sizes and repays_isolation(*[size for size in sizes if size is not None]):
                    isolate(op, chain)


def find_chain(product: ir.Operation) -> list[ir.Operation]:
    """The elementwise ops, and views between, that begin with the only user of a product's result, each the only user
    of the one before: what IREE computes in the product's kernel."""
    chain: list[ir.Operation] = []
    value, end = product.results[0], 0
    while (op := only_user(value)) is not None and (is_view(op) or reads_in_order(op, value)):
        chain.append(op)
        value, end = op.results[0], end if is_view(op) else len(chain)
    return chain[:end]


def reads_in_order(op: ir.Operation, value: ir.Value) -> bool:
    """Whether an elementwise op reads ``value`` in the order in which it writes its result."""
    if not is_elementwise(op):
        return False
    maps = read_maps(op)
    return any(read == value and map_ == maps[-1] for read, map_ in zip(read_inputs(op), maps, strict=False))


def find_reads(product: ir.Operation, chain: Sequence[ir.Operation]) -> list[ir.Value]:
    """Find the values that a kernel of ``chain`` reads from memory besides the product that it begins with: other
    elementwise ops whose result is used once are computed in it, and of a tensor of one number nothing is read."""
    inside = {product.results[0], *(op.results[0] for op in chain)}
    pending = [value for op in chain if not is_view(op) for value in read_inputs(op)]
    found: dict[ir.Value, None] = {}
    while pending:
        value = pending.pop()
        op = value.owner if isinstance(value, ir.OpResult) else None
        if value in inside or read_number(value) is not None:
            continue
        if op is not None and is_view(op):
            pending.append(op.operands[0])
        elif op is not None and is_elementwise(op) and only_user(value) is not None:
            pending += read_inputs(op)
        else:
            found[value] = None
    return list(found)


def isolate(product: ir.Operation, chain: Sequence[ir.Operation]) -> None:
    """Put a barrier between a product and what takes it; both, and all of ``chain``, move to right before its end,
    where the one kernel would have been."""
    for op, following in pairwise(reversed([product, *chain])):
        following.move_before(op)
    replace_operand(chain[0], product.results[0], hide_from_fusion(product.results[0], chain[0]))
