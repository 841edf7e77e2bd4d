# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-keep-itself``: what is no number does not equal itself."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.infra.passes import ModulePass
from retrograd.pipelines.transforms.helpers.barriers import walk
from retrograd.pipelines.transforms.helpers.maker import Maker

_EQUAL, _LESS_EQUAL = "torch.aten.eq.Tensor", "torch.aten.le.Tensor"


class BwdKeepItself(ModulePass):
    """Asks of a tensor that is compared with itself whether it is at most as large.

    torch-mlir folds ``x == x`` to true, of numbers too, of which that is how to tell those that are none. Both
    comparisons have the same answer, and no fold has one for this.
    """

    description = "Write x == x as x <= x, which no one takes to be true of NaN"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            for op in [op for op in walk(only_block(func, self.name)) if op.name == _EQUAL]:
                if op.operands[0] == op.operands[1]:
                    compared = Maker.before(op).value(_LESS_EQUAL, list(op.operands), op.results[0].type)
                    op.results[0].replace_all_uses_with(compared)
                    op.erase()
