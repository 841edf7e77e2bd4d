# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads a backward with bwd ops into the plain data that hook scheduling works on."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from retrograd.contract.attributes import BWD_ISLAND, BWD_RANDOM, ISLAND_OP
from retrograd.contract.hooks import CUSTOM_BACKWARD, POST_ACCUMULATE, Communicating
from retrograd.dialects import ir
from retrograd.pipelines.analysis.hooks.hook_graph import (
    ACCUMULATE,
    CALL_BACKWARD,
    COLLECTIVE,
    FINAL_CALLBACKS,
    ISLAND,
    UPDATE,
    WAIT,
    Effect,
    HookGraph,
    Task,
)
from retrograd.pipelines.analysis.hooks.hook_schedule import Order
from retrograd.pipelines.analysis.partition.read_graph import ReadGraph, operator_name, read_joint
from retrograd.pipelines.infra.functions import functions
from retrograd.pipelines.infra.passes import PassFailure

COMMUNICATION = "bwd.communication"
BUCKET = "bwd.bucket"
TUPLE = "torch.prim.TupleConstruct"
UNTUPLE = "torch.prim.TupleUnpack"
_UNLIST = "torch.prim.ListUnpack"
# A new value of so many bytes is written before the next one of its hook is worked out, and a gradient of so many
# accumulated before what comes after it. A stage more costs some 10 us, for which memory is worth having from here on.
LARGE_BYTES = 1 << 20
_NUMBERS = {
    "bwd.call_hook": "hook",
    "bwd.call_backward": "function",
    "bwd.accumulate_grad": "param",
    "bwd.final_callbacks": None,
    "bwd.update_input": "hook",
    "bwd.start_collective": None,
}
COLLECTIVE_OP, START_OP, WAIT_OP = "bwd.collective", "bwd.start_collective", "bwd.wait_collective"


@dataclass(frozen=True)
class ReadHooks:
    """A graph of tasks, with the function it was read from.

    ``ops`` are the numbers of each task's ops in ``source``: its own, between those that make a tuple of its values and
    take apart what it gives. Values have the same numbers in both. Ops that give no tensor (constants, sizes, lists)
    belong to no task: whoever needs them has a copy. An op that gives a list besides tensors has a task with what takes
    the list apart.
    """

    graph: HookGraph
    ops: tuple[tuple[int, ...], ...]
    source: ReadGraph

    def with_scalars(self, ops: Iterable[int]) -> list[int]:
        """Ops and those that give no tensor and that they need, in the order of the source."""
        graph = self.source.graph
        found: set[int] = set()
        pending = list(ops)
        while pending:
            op = pending.pop()
            if op not in found:
                found.add(op)
                taken = [graph.values[v] for v in graph.ops[op].operands if not graph.values[v].is_tensor]
                pending += [
                    v.producer for v in taken if v.producer is not None and _is_scalar_op(self.source, v.producer)
                ]
        return sorted(found)

    def start_of(self, task: int) -> ir.Operation | None:
        """The op of a task that starts a collective; None of another task."""
        return next((op for n in self.ops[task] if (op := self.source.ops[n]).name == START_OP), None)


def read_hooks(func: ir.Operation, name: str) -> ReadHooks:
    """Read a ``func.func`` for the pass called `name`.

    Raises:
        PassFailure: several blocks, an op with a region, an op that has no place in a backward, a tuple that is not
            taken apart, a post-accumulate hook that follows no accumulation.
    """
    _check(func, name)
    source = read_joint(func)
    tasks: list[Task] = []
    task_ops: list[tuple[int, ...]] = []
    taken_apart: set[int] = set()
    for op in source.graph.ops:
        if op.id in taken_apart:
            continue
        if op.name in _NUMBERS:
            task, ops = _read_effect(source, op.id, name)
        elif op.name == ISLAND_OP:
            task, ops = _read_island(source, op.id), (op.id,)
        elif op.name == WAIT_OP:
            task, ops = Task(op.operands, op.results, Effect(WAIT)), (op.id,)
        elif _is_compute(source, op.id):
            lists = _find_unpackers(source, op.id)
            gives = (*op.results, *(result for unpacker in lists for result in source.graph.ops[unpacker].results))
            task, ops = Task(tuple(sorted(_tensors(source, op.operands))), gives), (op.id, *lists)
            taken_apart.update(lists)
        else:
            continue
        tasks.append(task)
        task_ops.append(ops)
    graph = HookGraph(tuple(tasks), (*source.graph.forward_results, *source.graph.backward_results))
    _check_accumulations(graph, source, task_ops, name)
    return ReadHooks(graph, tuple(task_ops), source)


def mark_communication(module: ir.Operation, calls: Iterable[Communicating]) -> None:
    """Mark these calls, of hooks and of custom functions: they start something that goes on while other work is done,
    or say that a gradient of a bucket is there."""
    known = {(call.kind, call.number): call for call in calls}
    for func in functions(module):
        for view in func.regions[0].blocks[0].operations:
            call = known.get(_call_of(view.operation) or ("", 0))
            if call is None:
                continue
            with view.operation.context:
                view.operation.attributes[COMMUNICATION] = ir.UnitAttr.get()
                if call.bucket is not None:
                    wide = ir.IntegerType.get_signless(64)
                    view.operation.attributes[BUCKET] = ir.IntegerAttr.get(wide, call.bucket)


def _call_of(op: ir.Operation) -> tuple[str, int] | None:
    """The kind and number of what an op calls in Python."""
    if op.name == "bwd.call_hook":
        return ir.StringAttr(op.attributes["kind"]).value, ir.IntegerAttr(op.attributes["hook"]).value
    if op.name == "bwd.call_backward":
        return CUSTOM_BACKWARD, ir.IntegerAttr(op.attributes["function"]).value
    return None


def returned_values(read: ReadHooks, func: ir.Operation) -> tuple[int, ...]:
    """The values that a function returns, in the order of its results."""
    numbers = {value: number for number, value in enumerate(read.source.values)}
    return tuple(numbers[v] for v in list(func.regions[0].blocks[0].operations)[-1].operation.operands)


def _check(func: ir.Operation, name: str) -> None:
    if len(func.regions[0].blocks) != 1:
        raise PassFailure(func, f"{name}: a function of several blocks", "capture the graph without control flow")
    for view in func.regions[0].blocks[0].operations:
        op = view.operation
        if any(len(region.blocks) for region in op.regions):
            raise PassFailure(op, f"{name}: an op with a region", "capture the graph without control flow")
        if op.name == "bwd.save":
            raise PassFailure(op, f"{name}: a backward saves nothing", "run bwd-partition on the joint graph first")


def _check_accumulations(graph: HookGraph, source: ReadGraph, ops: list[tuple[int, ...]], name: str) -> None:
    for number in graph.effects:
        if graph.kind(number) == POST_ACCUMULATE and number not in graph.owners:
            op = next(source.ops[o] for o in ops[number] if source.graph.ops[o].name in _NUMBERS)
            message = f"{name}: no accumulate_grad precedes a post_acc_grad hook"
            raise PassFailure(op, message, "call such a hook after the accumulation that it belongs to")


def _read_effect(source: ReadGraph, number: int, name: str) -> tuple[Task, tuple[int, ...]]:
    op, graph = source.ops[number], source.graph
    ops = [number]
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    if len(op.operands) == 2:
        takes, before = _elements(source, graph.ops[number].operands[0], number, name)
        ops = [*before, number]
    if len(op.results) == 2:
        gives, after = _unpacked(source, graph.ops[number].results[0], number, name)
        ops += after
    if op.name == "bwd.update_input" and (len(takes) < 2 or takes[0] not in graph.arguments):
        message = f"{name}: updates what is no argument of the function"
        raise PassFailure(op, message, f"bundle the argument and its new value with {TUPLE}")
    attribute = _NUMBERS[op.name]
    index = 0 if attribute is None else ir.IntegerAttr(op.attributes[attribute]).value
    kinds = {
        "bwd.accumulate_grad": ACCUMULATE,
        "bwd.call_backward": CALL_BACKWARD,
        "bwd.final_callbacks": FINAL_CALLBACKS,
        "bwd.update_input": UPDATE,
        "bwd.start_collective": COLLECTIVE,
    }
    kind = kinds.get(op.name) or ir.StringAttr(op.attributes["kind"]).value
    size = graph.values[takes[-1 if kind == ACCUMULATE else 1]].bytes if kind in (UPDATE, ACCUMULATE) else 0
    starts = kind == COLLECTIVE
    if starts:
        size = sum(graph.values[v].bytes for v in gives)
    communication = starts or COMMUNICATION in op.attributes
    bucket = ir.IntegerAttr(op.attributes[BUCKET]).value if BUCKET in op.attributes else None
    large = not starts and size >= LARGE_BYTES
    effect = Effect(kind, index, communication, large=large, bytes=size, bucket=bucket)
    return Task(takes, gives, effect), tuple(ops)


def has_islands(func: ir.Operation) -> bool:
    """Whether ops of a function run in torch."""
    return _has(func, (ISLAND_OP,))


def has_collectives(func: ir.Operation) -> bool:
    """Whether a function has collectives, in one piece or started and waited for."""
    return _has(func, (COLLECTIVE_OP, START_OP))


def _has(func: ir.Operation, names: Collection[str]) -> bool:
    return any(operator_name(view.operation) in names for view in func.regions[0].blocks[0].operations)


def _read_island(source: ReadGraph, number: int) -> Task:
    op, attributes = source.graph.ops[number], source.ops[number].attributes
    effect = Effect(ISLAND, ir.IntegerAttr(attributes[BWD_ISLAND]).value, random=BWD_RANDOM in attributes)
    return Task(op.operands, op.results, effect)


def _elements(source: ReadGraph, value: int, user: int, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tensors that an effect takes as one value, and the ops that bundle them."""
    found = source.graph.values[value]
    if found.is_tensor:
        return (value,), ()
    if found.producer is not None:
        producer = source.graph.ops[found.producer]
        if producer.name == "torch.constant.none":
            return (), (producer.id,)
        if producer.name == TUPLE and all(source.graph.values[o].is_tensor for o in producer.operands):
            return producer.operands, (producer.id,)
    message = f"{name}: takes a {source.values[value].type} that is no bundle of tensors"
    raise PassFailure(source.ops[user], message, f"bundle the tensors with {TUPLE}")


def _unpacked(source: ReadGraph, value: int, giver: int, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tensors that an effect gives as one value, and the ops that take them apart."""
    if source.graph.values[value].is_tensor:
        return (value,), ()
    users = [source.graph.ops[u] for u in source.graph.users[value]]
    if not users:
        return (), ()
    if len(users) == 1 and users[0].name == UNTUPLE:
        return users[0].results, (users[0].id,)
    message = f"{name}: gives a tuple that is used as one"
    raise PassFailure(source.ops[giver], message, f"take it apart with one {UNTUPLE}")


def _is_compute(source: ReadGraph, number: int) -> bool:
    """Whether an op is work of a stage: it gives a tensor, and none that an effect gave already."""
    op = source.graph.ops[number]
    if op.name == UNTUPLE:
        producer = source.graph.values[op.operands[0]].producer
        if producer is not None and source.graph.ops[producer].name in _NUMBERS:
            return False
    return any(source.graph.values[r].is_tensor for r in op.results)


def _find_unpackers(source: ReadGraph, number: int) -> tuple[int, ...]:
    """Find what takes apart the lists that an op gives."""
    users = [u for value in source.graph.ops[number].results for u in source.graph.users[value]]
    return tuple(dict.fromkeys(u for u in users if source.graph.ops[u].name == _UNLIST))


def _is_scalar_op(source: ReadGraph, number: int) -> bool:
    op = source.graph.ops[number]
    return not op.name.startswith("bwd.") and not any(source.graph.values[r].is_tensor for r in op.results)


def _tensors(source: ReadGraph, values: Iterable[int]) -> set[int]:
    """The tensors that values are or were made from, through ops that give no tensor."""
    found: set[int] = set()
    pending = list(values)
    while pending:
        value = source.graph.values[pending.pop()]
        if value.is_tensor:
            found.add(value.id)
        elif value.producer is not None:
            pending += source.graph.ops[value.producer].operands
    return found


def with_views(read: ReadHooks, stage: Order) -> Order:
    """A stage with the views and constants of other stages that it needs: they cost nothing, and handed over they would
    be copies."""
    graph, own = read.graph, set(stage)
    pending = list(stage)
    while pending:
        for value in graph.tasks[pending.pop()].takes:
            task = graph.producers.get(value)
            if task is not None and task not in own and read.source.graph.free_ops.issuperset(read.ops[task]):
                own.add(task)
                pending.append(task)
    return tuple(sorted(own))
