# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-schedule-collectives``: in functions that are compiled ahead of time, collectives start early and are waited
for late."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.analysis.hooks.hook_graph import COLLECTIVE, ISLAND, WAIT
from retrograd.pipelines.analysis.hooks.hook_schedule import find_overlap_order
from retrograd.pipelines.infra.functions import functions
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.hook_reader import ReadHooks, has_collectives, read_hooks
from retrograd.pipelines.transforms.torch.bwd_schedule_hooks import apply_order


class BwdScheduleCollectives(ModulePass):
    """Orders each function that starts collectives: these as soon as what they take is computed, in the order in which
    they stand, and each wait in front of the first that takes what it gives.

    Backwards with hooks are not for this pass: ``bwd-schedule-hooks`` orders them, by the policy of the user.
    """

    description = "Start collectives early and wait for them late, in functions without hooks"

    def apply(self, module: ir.Operation) -> None:
        for func in functions(module):
            if has_collectives(func):
                read = read_hooks(func, self.name)
                _refuse_hooks(read, self.name)
                apply_order(func, read, find_overlap_order(read.graph))


def _refuse_hooks(read: ReadHooks, name: str) -> None:
    for number in read.graph.effects:
        if read.graph.kind(number) not in (COLLECTIVE, WAIT, ISLAND):
            op = next(op for n in read.ops[number] if (op := read.source.ops[n]).name.startswith("bwd."))
            message = f"{name}: {op.name} beside a collective"
            raise PassFailure(op, message, "order a backward with hooks by bwd-schedule-hooks")
