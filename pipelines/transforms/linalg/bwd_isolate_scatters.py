# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-isolate-scatters``: what a scatter adds up and where, and what reads it, are not part of its kernel."""

from __future__ import annotations

import math

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.barriers import hide, take_behind_barrier, walk
from retrograd.pipelines.transforms.helpers.fills import PLACES, SCATTER, TENSOR, UPDATES
from retrograd.pipelines.transforms.helpers.generics import GENERIC, is_reduced
from retrograd.pipelines.transforms.helpers.views import shares_storage, view_root

_MOVES = ("linalg.broadcast", "linalg.transpose")
# So many 64-bit places fill the 32 KiB of stack that IREE allows a kernel on a CPU.
_MOST_PLACES = 4096
_WIDENINGS = frozenset({"arith.extf", "arith.extsi", "arith.extui"})
_GATHERS = frozenset({"tensor.extract"})


class BwdIsolateScatters(ModulePass):
    """Puts barriers between a scatter and the elementwise op that computes its updates, and between a scatter whose
    tensor has other uses and what reads the result.

    A scatter writes into its tensor. IREE forms one kernel of it and an elementwise op that reads the result, with
    what else that op reads: a gather from the tensor as it was would find there what the scatter has written by then.

    IREE copies a widening of its operands into whatever uses it, a scatter too, and its code generator for GPUs cannot
    tile the two together: the gradient of an embedding in bf16, added up in f32, does not compile for CUDA. Elementwise
    ops other than widenings are not fused into scatters anyway, so that the barrier costs them nothing. On a CPU many
    widened places, 64 bits of the 32 that a sort gives, do not fit on the stack of the kernel either.
    """

    description = "Keep what computes a scatter's updates out of the scatter's kernel"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for block in func.regions[0].blocks:
                for op in list(walk(block)):
                    if op.name == SCATTER:
                        isolate_operands(op)
                        isolate_result(op)


def isolate_operands(scatter: ir.Operation) -> None:
    """Where the updates of ``scatter``, or many places, are computed by an elementwise op, take them from behind a
    barrier."""
    if len(scatter.operands) < 3:
        raise PassFailure(
            scatter, "bwd-isolate-scatters: a scatter of fewer than three operands", "give updates, places and tensor"
        )
    for number in (UPDATES, PLACES) if are_many(scatter.operands[PLACES]) else (UPDATES,):
        operand = scatter.operands[number]
        root = view_root(operand)
        if isinstance(root, ir.OpResult) and is_repeated(root.owner):
            scatter.operands[number] = take_behind_barrier(operand, scatter)


def are_many(places: ir.Value) -> bool:
    """Whether there are, or may be, more places than a kernel has stack for."""
    type_ = ir.RankedTensorType(places.type)
    return not type_.has_static_shape or math.prod(type_.shape) >= _MOST_PLACES


def is_repeated(op: ir.Operation) -> bool:
    """Whether IREE may compute ``op`` again in whatever kernel uses it: an elementwise op that widens or gathers. It
    makes one op of that and of what puts its elements in another order; ``bwd-fold-widenings`` of a widening and what
    reads it."""
    if op.name in _MOVES:
        source = view_root(op.operands[0])
        return isinstance(source, ir.OpResult) and is_repeated(source.owner)
    return has_any(op, _WIDENINGS | _GATHERS) or (
        op.name == GENERIC and not any(is_reduced(op)) and any(is_widened(operand) for operand in op.operands)
    )


def is_widened(value: ir.Value) -> bool:
    """Whether ``value`` is a view of what an elementwise op widens."""
    root = view_root(value)
    return isinstance(root, ir.OpResult) and has_any(root.owner, _WIDENINGS)


def has_any(op: ir.Operation, names: frozenset[str]) -> bool:
    """Whether ``op`` is elementwise and its body has ops of one of the names."""
    if op.name != GENERIC:
        return False
    return any(not names.isdisjoint({inner.name for inner in walk(block)}) for block in op.regions[0].blocks)


def isolate_result(scatter: ir.Operation) -> None:
    """Where what ``scatter`` writes into is used elsewhere too, have its result read from behind a barrier. Zeros that
    several scatters start at are not: each has its own."""
    tensor = scatter.operands[TENSOR]
    root = view_root(tensor)
    if is_shared(tensor) and not (is_filled(root) and is_written_only(root)):
        hide(scatter.result)


def is_filled(value: ir.Value) -> bool:
    """Whether all elements of ``value`` are one number that is known here."""
    if not isinstance(value, ir.OpResult):
        return False
    op = value.owner
    if op.name == "arith.constant":
        attribute = op.attributes["value"]
        return isinstance(attribute, ir.DenseElementsAttr) and bool(attribute.is_splat)
    return bool(op.name == "linalg.fill")


def is_written_only(value: ir.Value) -> bool:
    """Whether all uses of ``value``, itself or through views, are scatters that write into it."""
    return all(
        is_written_only(use.owner.results[0])
        if shares_storage(use.owner)
        else use.owner.name == SCATTER and use.operand_number == TENSOR
        for use in value.uses
    )


def is_shared(value: ir.Value) -> bool:
    """Whether the storage that ``value`` looks at has uses other than this one."""
    while len([*value.uses]) == 1:
        if not (isinstance(value, ir.OpResult) and shares_storage(value.owner)):
            return False
        value = value.owner.operands[0]
    return True
