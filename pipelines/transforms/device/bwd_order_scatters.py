# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-order-scatters``: of several values for one place the last is written, and all of it."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import walk
from retrograd.pipelines.transforms.helpers.fills import SCATTER, UNIQUE


class BwdOrderScatters(ModulePass):
    """Takes the promise off scatters that no two of their updates are for one place, which torch-mlir gives for all
    that overwrite. For code for a CPU.

    Which of several values for one place stays is undefined in PyTorch; that it is one of them is not. IREE hands the
    updates of such a scatter to threads, which wrote one half each of a row. Without the promise each thread has
    columns of its own, and writes the updates in order, as PyTorch's serial code does.
    """

    description = "Write the last of several values for one place, for a CPU"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for op in walk(only_block(func, self.name)):
                if op.name == SCATTER:
                    op.attributes[UNIQUE] = ir.BoolAttr.get(False)
