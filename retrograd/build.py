# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From a captured graph to a loaded program, with the cache in between."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakValueDictionary

import torch

from retrograd.contract.plan import RunIsland, StagePlan, whole_plan
from retrograd.contract.roles import BACKWARD, FORWARD, JOINT, OUTPUT, SAVED
from retrograd.contract.tensors import FunctionSpec
from retrograd.description import find_versions, function_specs
from retrograd.dialects import ir
from retrograd.fallback import Fallback
from retrograd.first_calls import Checks
from retrograd.frontend.autograd.trace import TracedBackward
from retrograd.frontend.capture import CapturedGraph
from retrograd.frontend.graph_calls import Check, CompiledFunction
from retrograd.frontend.importer import import_graph
from retrograd.frontend.islands import Island
from retrograd.frontend.narrowing import Packer, narrow_packer
from retrograd.frontend.pack_tracing import Packings, trace_pairs
from retrograd.frontend.port_roles import describe_graph
from retrograd.indices import refusing_wrong_indices
from retrograd.options import BackwardOptions, Options, target_on
from retrograd.pipelines.analysis.memory_size import parse_memory_size
from retrograd.pipelines.analysis.read_graph import read_hints
from retrograd.pipelines.budgeted import BudgetBuilder
from retrograd.pipelines.executable import Executable
from retrograd.pipelines.functions import find_function
from retrograd.pipelines.save_policy import SavePolicy
from retrograd.pipelines.staged import (
    Progress,
    StagedModule,
    build_executable,
    mark_module,
    stage_backward,
    stage_module,
)
from retrograd.pipelines.targets import Target
from retrograd.repair import Rebuild, Rebuilt
from retrograd.runtime.bound_function import BoundFunction
from retrograd.runtime.executor import Program
from retrograd.runtime.islands import IslandTimes
from retrograd.runtime.placement import choose_device, choose_uri
from retrograd.runtime.stage_executor import StageExecutor
from retrograd.store import open_store

_NO_BODIES: Mapping[str, torch.fx.GraphModule] = {}


@dataclass(frozen=True)
class Build:
    """A module that went all the way: its stages, executable and loaded program; what of it runs in torch."""

    staged: StagedModule
    executable: Executable
    program: Program
    specs: dict[str, FunctionSpec]
    cached: bool
    times: IslandTimes
    packings: Packings
    compile_portable: Callable[[], bytes]
    checks: Checks | None = None

    def function(self, name: str) -> CompiledFunction:
        """One function of it, on the names that the frontend knows values by."""
        interface = self.staged.function(name)
        return CompiledFunction(
            arguments=tuple(a.value for a in interface.arguments),
            results=tuple(r.value for r in interface.results),
            copied=frozenset(r.value for r in interface.results if r.role == SAVED),
            call=self._call(name),
            merged=self.staged.merged,
            narrowed={value: self._packer(how) for value, how in self.staged.narrowed.items()},
            device=self.program.torch_device,
            check=self._check(name),
        )

    def _check(self, name: str) -> Check | None:
        # Where residuals stay on the device, torch cannot read what a forward gives.
        if self.checks is None or self.program.is_staged:
            return None
        return self.checks.check_of(name, self.program.torch_device, self.staged, self.executable)

    def _packer(self, how: str) -> Packer:
        return self.packings.traced[how].packer() if how in self.packings.traced else narrow_packer(how)

    def _call(self, name: str) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        if not self.times.islands:
            return BoundFunction(self.program, self.specs[name], same_step=name == BACKWARD)
        plan = self.staged.plans.get(name) or whole_plan(self.staged.function(name))
        taken = {
            v for p in self.staged.plans.values() for s in p.steps if isinstance(s, RunIsland) for v in s.arguments
        }
        stages = [_within_reach(f, taken) for f in self.staged.stages]
        executor = StageExecutor(plan, self.program, stages, self.times.islands)
        return self.times.timed(executor.run)


def build_joint(captured: CapturedGraph, options: Options, phases: Progress, *, portable: bool = False) -> Build:
    """Compile a captured joint graph; ``portable`` is as for :func:`build_program`.

    Raises:
        CaptureError: an op that cannot be imported, or has no compiled form, without a fallback.
        PipelineError, CompileError: it cannot be compiled; names the op. Or a rule of the policy contradicts the model
            or matches nothing.
        InfeasibleBudget: no plan stays within ``options.memory_budget``.
    """

    packings = trace_pairs(captured.graph_module)

    def load(islands: Sequence[Island]) -> ir.Module:
        return import_joint(captured, options.policy, phases, islands, packings.bodies())

    return build_program(captured.graph_module, load, options, phases, packings, portable=portable)


def import_joint(
    captured: CapturedGraph,
    policy: SavePolicy,
    phases: Progress,
    islands: Sequence[Island] = (),
    bodies: Mapping[str, torch.fx.GraphModule] = _NO_BODIES,
) -> ir.Module:
    """A captured joint graph on MLIR, with the ops marked that ``policy`` is about; ``bodies`` are those of hooks.

    Raises:
        CaptureError: an op that cannot be imported.
        PipelineError: a rule of ``policy`` contradicts the model or matches nothing.
    """
    with phases.phase("import"):
        module = import_graph(captured.graph_module, captured.signature, bodies=bodies, islands=islands)
    mark_module(module, policy)
    return module


def build_graph(traced: torch.fx.GraphModule, function: str, options: Options) -> Mapping[str, CompiledFunction]:
    """Compile a graph that Dynamo captured, as the function of that name; returns what it became, the two halves of a
    joint graph or itself, by name.

    Raises:
        CaptureError, PipelineError, CompileError, InfeasibleBudget: as :func:`build_joint`.
        ValueError: a budget for a graph of open sizes.
    """

    # A forward alone saves nothing.
    packings = trace_pairs(traced) if function == JOINT else Packings({}, {})

    def load(islands: Sequence[Island]) -> ir.Module:
        module = import_graph(traced, function=function, bodies=packings.bodies(), islands=islands)
        if options.partition == "budget":
            _refuse_open_sizes(module)
        # Of several graphs that a model breaks into, a rule may be about one.
        mark_module(module, options.policy, unmatched="ignore")
        return module

    built = build_program(traced, load, options, Progress(), packings)
    functions = {f.name: built.function(f.name) for f in built.staged.functions}
    return functions | {FORWARD: refusing_wrong_indices(functions[FORWARD], traced)}


def build_program(
    graph_module: torch.fx.GraphModule,
    load: Callable[[Sequence[Island]], ir.Module],
    options: Options,
    phases: Progress,
    packings: Packings,
    *,
    portable: bool = False,
) -> Build:
    """Run what ``load`` imports of a graph, islands for what does not compile, through passes, compiler and loader.

    ``portable`` says whether it has what others than the runtime call, a file for ``iree-run-module``; otherwise that
    is compiled when it is asked for.

    Raises:
        CaptureError, PipelineError, CompileError, InfeasibleBudget: as :func:`build_joint`.
    """
    target, store = options.find_target(), open_store(options)
    builders: list[BudgetBuilder] = []

    def stage(islands: Sequence[Island]) -> StagedModule:
        module = load(islands)
        if options.partition != "budget" or find_function(module.operation, JOINT) is None:
            # A forward alone has nothing to partition, whatever the policy.
            return stage_module(module, options.partition, phases)
        source = module.operation.get_asm(enable_debug_info=True)
        builders.append(BudgetBuilder(source, module.context, target, find_versions(), phases, store, portable))
        return builders[-1].stage()

    def finish(staged: StagedModule) -> tuple[StagedModule, Executable, bool]:
        if builders:
            built = builders[-1].build(parse_memory_size(options.memory_budget))
            packings.check_saved(built[0].saved)
            return built
        packings.check_saved(staged.saved)
        return (staged, *build_executable(staged, target, find_versions(), phases, store, standalone=portable))

    fallback = Fallback(options.allowed_fallback(), target, find_versions(), store)
    (staged, executable, cached), islands = fallback.compile(graph_module, stage, finish)
    with phases.phase("load"):
        # Compiled for a device that is not here, it can be saved.
        program = Program.load(executable.vmfb, driver=options.uri(), needs_device=False)
    for note in executable.notes:
        warnings.warn(note, stacklevel=3)

    def compile_portable() -> bytes:
        if portable:
            return executable.vmfb
        # The same kernels, so with the same flags.
        same = target.only(executable.flags)
        return build_executable(staged, same, find_versions(), Progress(), store, standalone=True)[0].vmfb

    specs = function_specs(staged, executable)
    checks = Checks(options, store, Rebuild(target, partial(rebuild_function, options))) if options.verify else None
    return Build(staged, executable, program, specs, cached, IslandTimes(islands), packings, compile_portable, checks)


def rebuild_function(
    options: Options, graph_module: torch.fx.GraphModule, name: str, target: Target, reasons: Mapping[str, str]
) -> Rebuilt:
    """Compile a graph as one function by itself, for a target of one's own, with islands for the nodes that ``reasons``
    names. It keeps no memory budget, and what it saves for a backward is what the graph gives.

    Raises:
        CaptureError, PipelineError, CompileError: it cannot be compiled.
    """
    described = describe_graph(graph_module)

    def stage(islands: Sequence[Island]) -> StagedModule:
        return stage_module(import_graph(described, function=name, islands=islands), "default", Progress())

    def finish(staged: StagedModule) -> tuple[StagedModule, Executable, bool]:
        return (staged, *build_executable(staged, target, find_versions(), Progress(), store, standalone=False))

    store = open_store(options)
    fallback = Fallback("island", target, find_versions(), store, reasons)
    (staged, executable, cached), islands = fallback.compile(described, stage, finish)
    program = Program.load(executable.vmfb, driver=options.uri())
    specs, times = function_specs(staged, executable), IslandTimes(islands)
    built = Build(staged, executable, program, specs, cached, times, Packings({}, {}), lambda: executable.vmfb)
    function = built.function(name)
    return Rebuilt(refusing_wrong_indices(function, described) if name == FORWARD else function, staged, executable)


def _refuse_open_sizes(module: ir.Module) -> None:
    """Of open sizes a budget holds at those of the trace, which here are those of whichever call came first."""
    if read_hints(module.operation):
        raise ValueError("partition='budget' keeps a peak, which differs from size to size; compile for fixed sizes")


# By options and the text of the module: a backward is captured anew for reasons that do not change its graph.
_EXECUTORS: WeakValueDictionary[tuple[BackwardOptions, str, str], StageExecutor] = WeakValueDictionary()


def build_backward(traced: TracedBackward, options: BackwardOptions) -> tuple[StageExecutor, bool]:
    """Compile a backward that was captured as it ran; also says whether its graph was compiled before.

    Raises:
        CaptureError, PipelineError, CompileError: it cannot be compiled; names the op.
    """
    device = _device_of(traced.graph_module)
    phases, target = Progress(), target_on(device, options.target, options.kernels)
    driver = choose_uri(target.names, choose_device(target.names, [device]))
    # What compiles beside the training is the same program.
    plain = replace(options, background=False)
    store = open_store(options)
    plans: list[StagePlan] = []
    texts: list[str] = []

    def stage(islands: Sequence[Island]) -> StagedModule:
        module = import_graph(traced.graph_module, function=BACKWARD, bodies=traced.bodies, islands=islands)
        texts.append(f"{module}{traced.communication}")
        # Of an island the text has only what it takes and gives.
        if not islands and (known := _EXECUTORS.get((plain, driver, texts[-1]))) is not None:
            raise _Known(known)
        staged = stage_backward(module, options.hook_schedule, phases, traced.communication)
        plans.append(staged.plan)
        return staged.module

    def finish(staged: StagedModule) -> tuple[StagedModule, Executable]:
        return staged, build_executable(staged, target, find_versions(), phases, store, standalone=False)[0]

    fallback = Fallback(options.fallback, target, find_versions(), store)
    try:
        (staged, executable), islands = fallback.compile(traced.graph_module, stage, finish)
    except _Known as known:
        return known.executor, True
    program = Program.load(executable.vmfb, driver=driver)
    specs = list(function_specs(staged, executable).values())
    executor = StageExecutor(plans[-1], program, specs, islands)
    # A loop has an island for each of its turns, and one reason.
    counts = Counter(island.text for island in islands)
    executor.notes = tuple(f"runs in torch: {text}" + (f" ({n} times)" if n > 1 else "") for text, n in counts.items())
    if not islands:
        _EXECUTORS[plain, driver, texts[-1]] = executor
    return executor, False


class _Known(Exception):
    """A graph is that of a backward compiled before."""

    def __init__(self, executor: StageExecutor) -> None:
        super().__init__()
        self.executor = executor


def _device_of(graph_module: torch.fx.GraphModule) -> torch.device:
    """Where a graph's arguments are: on a CUDA device where any of them is."""
    places = [
        value.device
        for node in graph_module.graph.find_nodes(op="placeholder")
        if isinstance(value := node.meta.get("val"), torch.Tensor)
    ]
    return next((place for place in places if place.type == "cuda"), torch.device("cpu"))


def _within_reach(interface: FunctionSpec, taken: Collection[str]) -> FunctionSpec:
    """A function whose results of these names torch can read: residuals may stay where it cannot, in the memory of a
    device."""
    results = tuple(replace(r, role=OUTPUT) if r.role == SAVED and r.value in taken else r for r in interface.results)
    return replace(interface, results=results)
