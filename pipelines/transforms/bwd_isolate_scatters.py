# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-isolate-scatters``: what a scatter adds up is computed before it, in a kernel of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retrograd.dialects import ir
from retrograd.pipelines.conversions.convert_bwd_to_func import functions
from retrograd.pipelines.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.barriers import take_behind_barrier, view_root, walk

_SCATTER = "tm_tensor.scatter"
_UPDATES = 0


@dataclass(frozen=True)
class BwdIsolateScatters(ModulePass):
    """Puts a barrier between a scatter and the elementwise op that computes its updates.

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


def isolate_updates(scatter: ir.Operation) -> None:
    """Where the updates of ``scatter`` are computed by an elementwise op, take them from behind a barrier."""
    if len(scatter.operands) < 3:
        raise PassFailure(
            scatter, "bwd-isolate-scatters: a scatter of fewer than three operands", "give updates, places and tensor"
        )
    updates = scatter.operands[_UPDATES]
    root = view_root(updates)
    if isinstance(root, ir.OpResult) and root.owner.name == "linalg.generic":
        scatter.operands[_UPDATES] = take_behind_barrier(updates, scatter)
