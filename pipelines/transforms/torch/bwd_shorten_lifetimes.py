# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-shorten-lifetimes``: functions in stages, between which residuals are freed and results are allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import count, islice, pairwise

from retrograd.contract.attributes import BWD_NAME, BWD_ROLE, BWD_VALUE
from retrograd.contract.plan import StagePlan
from retrograd.contract.roles import BACKWARD, FORWARD, SAVED, is_own_residual
from retrograd.dialects import ir
from retrograd.pipelines.analysis.hooks.hook_schedule import Order
from retrograd.pipelines.analysis.partition.op_kinds import OpKind
from retrograd.pipelines.analysis.partition.read_graph import attribute_dicts
from retrograd.pipelines.analysis.stages.stage_cuts import CutFunction, find_cuts, split_behind
from retrograd.pipelines.infra.functions import find_function
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.stages.stage_plan import write_island_plans
from retrograd.pipelines.transforms.helpers.hook_reader import (
    LARGE_BYTES,
    ReadHooks,
    read_hooks,
    returned_values,
    with_views,
)
from retrograd.pipelines.transforms.torch.bwd_offload_saved import read_offloaded
from retrograd.pipelines.transforms.torch.bwd_outline_stages import outline_function
from retrograd.pipelines.transforms.torch.bwd_schedule_hooks import apply_order


class BwdShortenLifetimes(ModulePass):
    """Cuts ``@forward`` into ``@forward_0``, ``@forward_1``, ... behind residuals, and ``@backward`` behind gradients,
    where that lowers the peak of live bytes of a step, and leaves the plans that run them: these allocate what a stage
    gives when it runs, and free each residual after its last use.

    Residuals that ``bwd-offload-saved`` listed are on the host between the halves, and count while they are not.

    The stages are the fewest that reach the least peak that any have. Results come in the order that they had, and what
    each needs right before it. Functions that gain less than ``gain`` stay whole, and what keeps the
    step within ``floor`` is cut no further: below what it takes in any case there is nothing to win.
    """

    description = "Cut functions where that lowers the peak, and leave the plans that free residuals"

    gain: int = field(default=LARGE_BYTES, metadata={"help": "bytes that cutting has to save"})
    floor: int = field(default=0, metadata={"help": "bytes that a step takes in any case"})

    def apply(self, module: ir.Operation) -> None:
        found = {name: func for name in (FORWARD, BACKWARD) if (func := find_function(module, name)) is not None}
        if BACKWARD not in found:
            message = f"{self.name}: no function @{BACKWARD} in the module"
            raise PassFailure(module, message, "run bwd-partition first")
        reads = {name: read_hooks(func, self.name) for name, func in found.items()}
        orders: dict[str, tuple[Order, ...]] = {}
        for name, read in reads.items():
            self._refuse_effects(read)
            orders[name] = order_by_results(read, returned_values(read, found[name]))
        parts = [self._describe(found, reads[name], name, orders[name]) for name in found]
        plans: dict[str, StagePlan] = {}
        for name, cuts in zip(found, find_cuts(parts, self.floor, self.gain), strict=True):
            if cuts:
                plans[name] = self._outline(found[name], reads[name], name, orders[name], cuts)
        if plans:
            write_island_plans(module, plans)

    def _refuse_effects(self, read: ReadHooks) -> None:
        for number in read.graph.effects:
            effect = read.source.ops[read.ops[number][-1]]
            message = f"{self.name}: a function with effects"
            raise PassFailure(effect, message, "bwd-outline-stages and bwd-outline-islands cut at these")

    def _describe(
        self, found: Mapping[str, ir.Operation], read: ReadHooks, name: str, order: Sequence[Sequence[int]]
    ) -> CutFunction:
        ops = tuple(tuple(read.with_scalars(op for task in part for op in read.ops[task])) for part in order)
        listed = read_offloaded(found[name].parent.operation)
        if name == FORWARD:
            given = zip(returned_values(read, found[name]), attribute_dicts(found[name], "res_attrs"), strict=True)
            moved = {v for v, role in given if role.get(BWD_ROLE) == SAVED and role.get(BWD_VALUE) in listed}
            return CutFunction(read.source.graph, ops, moved=frozenset(moved))
        own, moved, lent = set[int](), set[int](), 0
        roles = attribute_dicts(found[name], "arg_attrs")
        for value, role in zip(read.source.graph.arguments, roles, strict=True):
            if role.get(BWD_VALUE) in listed:
                moved.add(value)
            if is_own_residual(role.get(BWD_ROLE, ""), role.get(BWD_NAME, "")):
                own.add(value)
            elif role.get(BWD_ROLE) == SAVED:
                lent += read.source.graph.values[value].bytes
        return CutFunction(read.source.graph, ops, frozenset(own), lent, frozenset(moved & own))

    def _outline(
        self, func: ir.Operation, read: ReadHooks, name: str, order: Sequence[Order], cuts: Sequence[int]
    ) -> StagePlan:
        apply_order(func, read, [task for part in order for task in part])
        ordered = read_hooks(func, self.name)
        stages = [with_views(ordered, stage) for stage in _number_stages(order, cuts)]
        return outline_function(func, ordered, self.name, name, stages)


def order_by_results(read: ReadHooks, returned: Sequence[int]) -> tuple[Order, ...]:
    """The tasks of a function in the order of its results, what each needs right before it, as runs that end with an op
    that gives a result or one of a product's operands, or with a product: what these give is in memory in any case."""
    graph, source = read.graph, read.source.graph
    givers = sorted({graph.producers[v] for v in returned if v in graph.producers})
    placed: dict[int, None] = {}
    for giver in givers:
        pending, needed = [giver], set[int]()
        while pending:
            task = pending.pop()
            if task not in placed and task not in needed:
                needed.add(task)
                pending += [graph.producers[v] for v in graph.tasks[task].takes if v in graph.producers]
        placed.update(dict.fromkeys(sorted(needed)))
    products = {n for n in placed if any(source.ops[op].kind is OpKind.COMPUTE for op in read.ops[n])}
    operands = {maker for n in products for v in graph.tasks[n].takes if (maker := _maker(read, v)) is not None}
    return split_behind(list(placed), products.union(givers, operands))


def _maker(read: ReadHooks, value: int) -> int | None:
    """The task that computes ``value``, or what it is a view of; None for arguments and constants."""
    graph = read.graph
    while (task := graph.producers.get(value)) is not None:
        if not read.source.graph.free_ops.issuperset(read.ops[task]):
            return task
        viewed = [v for v in graph.tasks[task].takes if v in graph.producers or v in read.source.graph.arguments]
        if len(viewed) != 1:
            return None
        value = viewed[0]
    return None


def _number_stages(order: Sequence[Order], cuts: Sequence[int]) -> tuple[Order, ...]:
    """The tasks of each stage, by the numbers that they have once they are in order."""
    borders = [0, *cuts, len(order)]
    numbers = count()
    return tuple(tuple(islice(numbers, sum(map(len, order[first:end])))) for first, end in pairwise(borders))
