# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-isolate-scatters``: what a scatter adds up, and where need be what reads it, is not part of its kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retrograd.dialects import ir
from retrograd.pipelines.conversions.convert_bwd_to_func import functions
from retrograd.pipelines.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.barriers import VIEWS, hide, take_behind_barrier, view_root, walk

_SCATTER = "tm_tensor.scatter"
_UPDATES, _TENSOR = 0, 2
_REPEATED = frozenset({"arith.extf", "arith.extsi", "arith.extui", "tensor.extract"})


@dataclass(frozen=True)
class BwdIsolateScatters(ModulePass):
    """Puts barriers between a scatter and the elementwise op that computes its updates, and between a scatter whose
    tensor has other uses and what reads the result.

    A scatter writes into its tensor. IREE forms one kernel of it and an elementwise op that reads the result, with
    what else that op reads: a gather from the tensor as it was would find there what the scatter has written by then.

    IREE copies a widening of its operands into whatever uses it, a scatter too, and its code generator for GPUs cannot
    tile the two together: the gradient of an embedding in bf16, added up in f32, does not compile for CUDA. Elementwise
    ops other than widenings are not fused into scatters anyway, so that the barrier costs them nothing.
    """

    name: ClassVar[str] = "bwd-isolate-scatters"
    description: ClassVar[str] = "Keep what computes a scatter's updates out of the scatter's kernel"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for block in func.regions[0].blocks:
                for op in list(walk(block)):
                    if op.name == _SCATTER:
                        isolate_updates(op)
                        isolate_result(op)


def isolate_updates(scatter: ir.Operation) -> None:
    """Where the updates of ``scatter`` are computed by an elementwise op, take them from behind a barrier."""
    if len(scatter.operands) < 3:
        raise PassFailure(
            scatter, "bwd-isolate-scatters: a scatter of fewer than three operands", "give updates, places and tensor"
        )
    updates = scatter.operands[_UPDATES]
    root = view_root(updates)
    if isinstance(root, ir.OpResult) and is_repeated(root.owner):
        scatter.operands[_UPDATES] = take_behind_barrier(updates, scatter)


def is_repeated(op: ir.Operation) -> bool:
    """Whether IREE may compute ``op`` again in whatever kernel uses it: an elementwise op that widens or gathers."""
    if op.name != "linalg.generic":
        return False
    return any(not _REPEATED.isdisjoint({inner.name for inner in walk(block)}) for block in op.regions[0].blocks)


def isolate_result(scatter: ir.Operation) -> None:
    """Where what ``scatter`` writes into is used elsewhere too, have its result read from behind a barrier. Zeros that
    several scatters start at are not: each has its own."""
    tensor = scatter.operands[_TENSOR]
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
        if use.owner.name in VIEWS
        else use.owner.name == _SCATTER and use.operand_number == _TENSOR
        for use in value.uses
    )


def is_shared(value: ir.Value) -> bool:
    """Whether the storage that ``value`` looks at has uses other than this one."""
    while len([*value.uses]) == 1:
        if not (isinstance(value, ir.OpResult) and value.owner.name in VIEWS):
            return False
        value = value.owner.operands[0]
    return True
