# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-outline-islands``: what lies between two islands becomes a function, the islands steps of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retrograd.contract.plan import StagePlan
from retrograd.dialects import ir
from retrograd.pipelines.analysis.hook_schedule import find_fewest_stages_order
from retrograd.pipelines.functions import functions
from retrograd.pipelines.passes import ModulePass, PassFailure
from retrograd.pipelines.stage_plan import write_island_plans
from retrograd.pipelines.transforms.bwd_outline_stages import outline_function
from retrograd.pipelines.transforms.bwd_schedule_hooks import apply_order
from retrograd.pipelines.transforms.hook_reader import has_islands, read_hooks


@dataclass(frozen=True)
class BwdOutlineIslands(ModulePass):
    """Cuts each function with islands, ``torch.operator "torch.retrograd.island"``, at these, into as few functions
    as their dependencies allow: ``@forward`` into ``@forward_0``, ``@forward_1``, ...

    Leaves a `StagePlan` for each on the module. Functions without islands stay as they are. Backwards with hooks are
    not for this pass: ``bwd-outline-stages`` cuts them at islands too.
    """

    name: ClassVar[str] = "bwd-outline-islands"
    description: ClassVar[str] = "Cut functions at what runs in torch, and leave the plans that run them"

    def apply(self, module: ir.Operation) -> None:
        plans: dict[str, StagePlan] = {}
        for func in functions(module):
            if not has_islands(func):
                continue
            _refuse_hooks(func, self.name)
            read = read_hooks(func, self.name)
            apply_order(func, read, find_fewest_stages_order(read.graph))
            name = ir.StringAttr(func.attributes["sym_name"]).value
            plans[name] = outline_function(func, read_hooks(func, self.name), self.name, name)
        if plans:
            write_island_plans(module, plans)


def _refuse_hooks(func: ir.Operation, name: str) -> None:
    for view in func.regions[0].blocks[0].operations:
        if view.operation.name.startswith("bwd."):
            message = f"{name}: {view.operation.name} beside an island"
            raise PassFailure(view.operation, message, "cut a backward with hooks by bwd-outline-stages")
