# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-outline-stages``: what lies between two effects becomes a function, the effects a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from retrograd.contract.attributes import BWD_NAME, BWD_ROLE, BWD_SHAPE, BWD_VALUE
from retrograd.contract.plan import (
    AccumulateGrad,
    CallBackward,
    CallHook,
    FinalCallbacks,
    RunIsland,
    RunStage,
    StagePlan,
    StartCollective,
    Step,
    UpdateInput,
    WaitCollective,
    insert_frees,
)
from retrograd.contract.roles import BACKWARD, SAVED, SIZE
from retrograd.contract.sizes import find_symbols, parse_shape
from retrograd.dialects import builders, ir
from retrograd.pipelines.analysis.hooks.hook_graph import UPDATE, Task
from retrograd.pipelines.analysis.hooks.hook_schedule import Order, find_stages
from retrograd.pipelines.analysis.partition.read_graph import ShapeReader, attribute_dicts
from retrograd.pipelines.infra.functions import find_function
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.stages.stage_plan import write_plan
from retrograd.pipelines.transforms.helpers.function_builder import FunctionSketch, Port, build_function
from retrograd.pipelines.transforms.helpers.hook_reader import ReadHooks, read_hooks, returned_values


class BwdOutlineStages(ModulePass):
    """Cuts ``@backward`` at its effects into ``@stage_0``, ``@stage_1``, ..., and leaves a `StagePlan` on the module.

    A stage takes the tensors that its ops need from elsewhere, and the open sizes of all that it takes and gives, and
    gives the tensors that are needed elsewhere; ops that give no tensor are in each stage that needs them. A backward
    with no effect stays whole, as the one stage ``@backward``.
    """

    description = "Cut @backward at its effects into functions, and leave the plan that runs them"

    def apply(self, module: ir.Operation) -> None:
        func = find_function(module, BACKWARD)
        if func is None:
            raise PassFailure(module, f"{self.name}: no function @backward in the module", "import a backward first")
        read = read_hooks(func, self.name)
        names = name_values(read)
        returned = returned_values(read, func)
        arguments = tuple(names[a] for a in read.source.graph.arguments)
        results = tuple(names[r] for r in returned)
        if not read.graph.effects:
            steps: tuple[Step, ...] = (RunStage(BACKWARD, arguments, results),)
            write_plan(module, insert_frees(StagePlan(arguments, steps, results)))
            return
        write_plan(module, outline_function(func, read, self.name, "stage"))


def outline_function(
    func: ir.Operation, read: ReadHooks, pass_name: str, prefix: str, stages: Sequence[Order] | None = None
) -> StagePlan:
    """Put functions ``@<prefix>_0``, ``@<prefix>_1``, ... in the place of a scheduled function; returns the plan.
    ``stages`` are runs of tasks; where they are not given, what lies between two effects is one.

    Raises:
        PassFailure: the function returns something that is no tensor.
    """
    names = name_values(read)
    returned = returned_values(read, func)
    _check_results(func, read, returned, pass_name)
    sketches = sketch_stages(func, read, names, returned, prefix, stages)
    for sketch in sketches.values():
        build_function(func, read.source, sketch)
    arguments, results = (tuple(names[v] for v in values) for values in (read.source.graph.arguments, returned))
    plan = StagePlan(arguments, tuple(_find_steps(read, sketches, names)), results)
    func.erase()
    return insert_frees(plan)


def name_values(read: ReadHooks) -> list[str]:
    """A name for each value that no other value has: the one that the import gave it, numbered from the second on."""
    taken: set[str] = set()
    names = []
    for value in read.source.graph.values:
        name, number = value.name, 0
        while name in taken:
            number += 1
            name = f"{value.name}.{number}"
        taken.add(name)
        names.append(name)
    return names


def sketch_stages(
    func: ir.Operation,
    read: ReadHooks,
    names: Sequence[str],
    returned: Sequence[int],
    prefix: str,
    stages: Sequence[Order] | None = None,
) -> dict[int, FunctionSketch]:
    """The stages of a scheduled function, each under the number of its last task. A task that is in several ``stages``
    runs in each of them."""
    graph = read.graph
    order = [number for number in range(len(graph.tasks)) if number in graph.live]
    own_arguments = _known_ports(read.source.graph.arguments, attribute_dicts(func, "arg_attrs"), names)
    own_results = _known_ports(returned, attribute_dicts(func, "res_attrs"), names)
    sizes = {p.attributes[BWD_NAME]: v for v, p in own_arguments.items() if p.attributes.get(BWD_ROLE) == SIZE}
    shapes = ShapeReader(func)

    def port(value: int, own: Mapping[int, Port]) -> Port:
        return own.get(value) or _intermediate(value, names[value], shapes.text(read.source.values[value]))

    stages = find_stages(graph, order) if stages is None else stages
    inside = [{value for number in stage for value in graph.tasks[number].gives} for stage in stages]
    # What is returned, or goes from one step to another.
    wanted = {*returned, *(v for number in graph.effects for v in graph.tasks[number].takes)}
    for stage, given in zip(stages, inside, strict=True):
        wanted.update(v for number in stage for v in graph.tasks[number].takes if v not in given)
    sketches = {}
    for index, (stage, given) in enumerate(zip(stages, inside, strict=True)):
        tasks = [graph.tasks[number] for number in stage]
        ops = read.with_scalars(op for number in stage for op in read.ops[number])
        taken = _taken(read, ops, tasks, given)
        kept = sorted(given & wanted)
        # Whoever gives a value first gives it for all.
        wanted -= given
        results = [port(v, own_results) for v in kept]
        arguments = [port(v, own_arguments) for v in taken]
        # The sizes that its tensors have, it takes too.
        shown = (p.attributes.get(BWD_SHAPE, "") for p in (*arguments, *results))
        known = find_symbols([size for text in shown for size in parse_shape(text)])
        taken = sorted({*taken, *[value for name, value in sizes.items() if name in known]})
        arguments = [port(v, own_arguments) for v in taken]
        sketches[stage[-1]] = FunctionSketch(f"{prefix}_{index}", arguments, ops, results)
    return sketches


def _taken(read: ReadHooks, ops: Sequence[int], tasks: Sequence[Task], given: set[int]) -> list[int]:
    """Find what a stage takes: tensors that none of its ops computes, and arguments of the function that are no
    tensors."""
    graph = read.source.graph
    scalars = {
        v for op in ops for v in graph.ops[op].operands if graph.values[v].producer is None and v in graph.arguments
    }
    return sorted({v for task in tasks for v in task.takes} - given | scalars)


def _known_ports(
    values: Sequence[int], attributes: Sequence[Mapping[str, str]], names: Sequence[str]
) -> dict[int, Port]:
    """The function's own arguments or results as ports, by value; of one that is returned twice, the first."""
    known: dict[int, Port] = {}
    for value, own in zip(values, attributes, strict=True):
        known.setdefault(value, Port(value, {**own, BWD_VALUE: names[value]}))
    return known


def _intermediate(value: int, name: str, shape: str) -> Port:
    attributes = {BWD_ROLE: SAVED, BWD_NAME: name, BWD_VALUE: name}
    return Port(value, attributes | ({BWD_SHAPE: shape} if shape else {}))


def _find_steps(read: ReadHooks, sketches: Mapping[int, FunctionSketch], names: Sequence[str]) -> list[Step]:
    steps: list[Step] = []
    # The arguments that values were written to: stages read these from there, so that nothing holds them twice. User
    # code may write to arguments.
    written: dict[int, int] = {}
    for number, task in enumerate(read.graph.tasks):
        if number in sketches:
            sketch = sketches[number]
            taken = tuple(names[written.get(port.value, port.value)] for port in sketch.arguments)
            steps.append(RunStage(sketch.name, taken, tuple(names[port.value] for port in sketch.results)))
        if task.effect is not None:
            steps.append(_effect_step(read, number, names))
            if task.effect.kind != UPDATE:
                written = {}
                continue
            target, value, *views = task.takes
            written = {v: place for v, place in written.items() if place not in (target, *views)} | {value: target}
    return steps


def _effect_step(read: ReadHooks, number: int, names: Sequence[str]) -> Step:
    graph, task = read.graph, read.graph.tasks[number]
    effect = task.effect
    assert effect is not None
    arguments = tuple(names[v] for v in task.takes)
    given = [names[v] if v in graph.needed else "" for v in task.gives]
    while given and not given[-1]:
        given.pop()
    match effect.kind:
        case "accumulate_grad":
            return AccumulateGrad(effect.number, *arguments)
        case "island":
            sizes = tuple(read.source.graph.values[v].bytes for v in task.gives[: len(given)])
            return RunIsland(effect.number, arguments, tuple(given), sizes)
        case "start_collective":
            start = read.start_of(number)
            assert start is not None
            what = asdict(builders.read_collective(start))
            sizes = tuple(read.source.graph.values[v].bytes for v in task.gives[: len(given)])
            return StartCollective(**what, arguments=arguments, results=tuple(given), bytes=sizes)
        case "wait_collective":
            return WaitCollective(arguments, tuple(given))
        case "call_backward":
            return CallBackward(effect.number, arguments, tuple(given))
        case "final_callbacks":
            return FinalCallbacks()
        case "update_input":
            return UpdateInput(*arguments[:2])
        case _:
            return CallHook(effect.kind, effect.number, arguments, tuple(given))


def _check_results(func: ir.Operation, read: ReadHooks, returned: Sequence[int], name: str) -> None:
    for value in returned:
        if not read.source.graph.values[value].is_tensor:
            message = f"{name}: returns a {read.source.values[value].type}, which no stage can give"
            raise PassFailure(func, message, "return tensors only")
