# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-outline-islands``: what lies between two islands becomes a function, the islands steps of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from itertools import count, islice

from retrograd.contract.attributes import BWD_NAME, BWD_ROLE
from retrograd.contract.plan import StagePlan
from retrograd.contract.roles import INPUT, TANGENT, is_own_residual
from retrograd.dialects import ir
from retrograd.pipelines.analysis.hooks.hook_schedule import Order
from retrograd.pipelines.analysis.partition.op_kinds import OpKind
from retrograd.pipelines.analysis.partition.read_graph import attribute_dicts
from retrograd.pipelines.analysis.stages.stage_cuts import CutFunction
from retrograd.pipelines.analysis.stages.stage_placement import find_lean_stages
from retrograd.pipelines.infra.functions import functions
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.stages.stage_plan import write_island_plans
from retrograd.pipelines.transforms.helpers.hook_reader import (
    START_OP,
    WAIT_OP,
    ReadHooks,
    has_collectives,
    has_islands,
    read_hooks,
    with_views,
)
from retrograd.pipelines.transforms.torch.bwd_outline_stages import outline_function
from retrograd.pipelines.transforms.torch.bwd_schedule_hooks import apply_order

# What is smaller is not worth an order: a few bytes less would have large values computed earlier or later.
_SMALL = 1 << 16
# Ops of bwd that are cut at, as islands are.
_KNOWN = ("bwd.create_token", START_OP, WAIT_OP)


class BwdOutlineIslands(ModulePass):
    """Cuts each function with islands, ``torch.operator "torch.retrograd.island"``, at these, into as few functions
    as their dependencies allow: ``@forward`` into ``@forward_0``, ``@forward_1``, ... Which of them computes what is
    chosen so that the fewest bytes go from one to the next: gradients of weights where their operands are, and are
    freed. A stage is cut in two in front of a product where that lowers the peak by ``gain``: what only the first of
    them takes is freed then.

    A function that starts collectives is cut at these too, and keeps its order, which ``bwd-schedule-collectives`` and
    ``bwd-prefetch-gathers`` chose.

    Leaves a `StagePlan` for each on the module. Functions without islands stay as they are. Backwards with hooks are
    not for this pass: ``bwd-outline-stages`` cuts them at islands too.
    """

    description = "Cut functions at what runs in torch, and leave the plans that run them"

    gain: int = field(default=32 << 20, metadata={"help": "bytes that a stage more has to save"})

    def apply(self, module: ir.Operation) -> None:
        plans: dict[str, StagePlan] = {}
        for func in functions(module):
            if not has_islands(func) and not has_collectives(func):
                continue
            _refuse_hooks(func, self.name)
            name = ir.StringAttr(func.attributes["sym_name"]).value
            plans[name] = self._outline(func, name)
        if plans:
            write_island_plans(module, plans)

    def _outline(self, func: ir.Operation, name: str) -> StagePlan:
        read = read_hooks(func, self.name)
        if has_collectives(func):
            return outline_function(func, read, self.name, name)
        runs = _find_runs(func, read, self.gain)
        apply_order(func, read, [task for run in runs for task in run])
        numbers = count()
        ordered = [tuple(islice(numbers, len(run))) for run in runs]
        inner = read_hooks(func, self.name)
        stages = [own for run, own in zip(runs, ordered, strict=True) if read.graph.kind(run[0]) is None]
        return outline_function(func, inner, self.name, name, [with_views(inner, stage) for stage in stages])


def _find_runs(func: ir.Operation, read: ReadHooks, gain: int) -> tuple[Order, ...]:
    """The tasks in order: what each stage computes, and the islands between two."""
    graph, source = read.graph, read.source.graph
    sizes = _find_sizes(func, read)
    owned = frozenset(v for v in source.arguments if sizes[v])

    products = {
        n: max((source.values[v].bytes for v in graph.tasks[n].takes), default=0)
        for n in graph.live
        if any(source.ops[op].kind is OpKind.COMPUTE for op in read.ops[n])
    }

    def measure(runs: Sequence[Order]) -> list[int]:
        ops = tuple(tuple(read.with_scalars(op for task in run for op in read.ops[task])) for run in runs)
        parts = CutFunction(source, ops, owned)
        # Kernels take operands in other forms: of float32 three parts of half its size.
        copied = [3 * max((products.get(task, 0) for task in run), default=0) // 2 for run in runs]
        return [parts.peak(n, n + 1) + copied[n] if graph.kind(run[0]) is None else 0 for n, run in enumerate(runs)]

    large = {n: taken for n, taken in products.items() if taken >= gain and graph.kind(n) is None}
    free = {n for n in graph.live if source.free_ops.issuperset(read.ops[n])}
    fixed = graph.live - _find_following(func, read)
    return find_lean_stages(graph, sizes, large, measure, free=free, fixed=fixed, gain=gain).runs


def _find_sizes(func: ir.Operation, read: ReadHooks) -> list[int]:
    """Weigh what it costs that each value is alive between two stages, by bytes; of arguments those that a plan frees
    count, which are residuals and tangents. What is computed has to be written besides."""
    graph = read.source.graph
    sizes = [0 if value.bytes < _SMALL else 5 * value.bytes for value in graph.values]
    for value, own in zip(graph.arguments, attribute_dicts(func, "arg_attrs"), strict=True):
        role = own.get(BWD_ROLE, "")
        is_freed = role == TANGENT or is_own_residual(role, own.get(BWD_NAME, ""))
        sizes[value] = sizes[value] // 5 * 4 if is_freed else 0
    return sizes


def _find_following(func: ir.Operation, read: ReadHooks) -> set[int]:
    """The tasks that follow from tangents, or without such from inputs, which eager computes when these are there. The
    others would be in memory for longer if they ran before they are needed, and what they are made of meanwhile too."""
    roles = [own.get(BWD_ROLE, "") for own in attribute_dicts(func, "arg_attrs")]
    wanted = TANGENT if TANGENT in roles else INPUT
    following = {v for v, role in zip(read.source.graph.arguments, roles, strict=True) if role == wanted}
    tasks: set[int] = set()
    for number, task in enumerate(read.graph.tasks):
        if not following.isdisjoint(task.takes):
            tasks.add(number)
            following.update(task.gives)
    return tasks


def _refuse_hooks(func: ir.Operation, name: str) -> None:
    for view in func.regions[0].blocks[0].operations:
        if view.operation.name.startswith("bwd.") and view.operation.name not in _KNOWN:
            message = f"{name}: {view.operation.name} beside an island"
            raise PassFailure(view.operation, message, "cut a backward with hooks by bwd-outline-stages")
