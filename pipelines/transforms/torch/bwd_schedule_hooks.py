# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-schedule-hooks``: hooks, accumulations and compute in the order that a policy chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from retrograd.contract.roles import BACKWARD
from retrograd.dialects import builders, bwd, ir
from retrograd.pipelines.analysis.hooks.hook_schedule import POLICIES, HookSchedule
from retrograd.pipelines.infra.functions import find_function
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.hook_reader import UNTUPLE, ReadHooks, read_hooks, returned_values


class BwdScheduleHooks(ModulePass):
    """Puts the ops of ``@backward`` into the order of a policy, with all effects on one chain of tokens in that order.
    Ops without an effect whose results nobody needs go, what takes apart unused results of hooks among them."""

    description = "Order hooks, accumulations and compute of @backward"

    policy: HookSchedule = field(
        default="eager-order",
        metadata={
            "help": "eager-order: as eager calls them; asap: as soon as their inputs exist; "
            "overlap: communication first; "
            "fewest-stages: the fewest cuts between compiled functions"
        },
    )

    def apply(self, module: ir.Operation) -> None:
        func = find_function(module, BACKWARD)
        if func is None:
            raise PassFailure(module, f"{self.name}: no function @backward in the module", "import a backward first")
        read = read_hooks(func, self.name)
        apply_order(func, read, POLICIES[self.policy](read.graph))


def apply_order(func: ir.Operation, read: ReadHooks, order: Sequence[int]) -> None:
    """Put the ops of a function into the order of its tasks, chain the effects, and erase the ops of no task in it."""
    block = func.regions[0].blocks[0]
    last = list(block.operations)[-1].operation
    returned = sorted({*returned_values(read, func)})
    wanted = [op for task in order for op in read.with_scalars(_used_ops(read, task))]
    wanted += read.with_scalars(
        p for v in returned if (p := read.source.graph.values[v].producer) is not None and _gives_no_tensor(read, v)
    )
    kept = dict.fromkeys(wanted)
    token: ir.Value | None = None
    for number in kept:
        op = read.source.ops[number]
        op.move_before(last)
        if op.name.startswith("bwd.") and any(map(bwd.is_token, op.operands)):
            if token is None:
                with op.location, ir.InsertionPoint(op):
                    token = builders.create_token()
            op.operands[len(op.operands) - 1] = token
            token = op.results[len(op.results) - 1]
    for number in reversed(range(len(read.source.ops))):
        if number not in kept:
            read.source.ops[number].erase()


def _used_ops(read: ReadHooks, task: int) -> Sequence[int]:
    """A task's ops, but for what takes apart results that no live task and no caller needs."""
    if read.graph.needed.isdisjoint(read.graph.tasks[task].gives):
        return [op for op in read.ops[task] if read.source.graph.ops[op].name != UNTUPLE]
    return read.ops[task]


def _gives_no_tensor(read: ReadHooks, value: int) -> bool:
    return not read.source.graph.values[value].is_tensor
