# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From a captured graph to a loaded program, with the cache in between: one way for all doors.

A graph is staged (the passes of every stage), finished (lowered and compiled), staged anew with islands where that
fails, and loaded. :func:`build` is this skeleton; doors differ in what they capture and in what they do with a `Build`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakValueDictionary

import torch

from retrograd.built import Build, function_specs
from retrograd.contract.partitions import DEFAULT
from retrograd.contract.roles import BACKWARD, FORWARD
from retrograd.description import describe_memory
from retrograd.fallback import Fallback
from retrograd.first_calls import Checks
from retrograd.frontend.autograd.tracing.trace import TracedBackward
from retrograd.frontend.doors.captured_graph import Captured
from retrograd.frontend.doors.graph_calls import CompiledFunction
from retrograd.frontend.doors.port_roles import describe_graph
from retrograd.frontend.libraries.written_out import uses_libraries, write_out
from retrograd.frontend.preparation.index_bounds import find_index_bounds
from retrograd.frontend.python.user_lines import warn_user
from retrograd.options import BackwardRequest, Options
from retrograd.pipelines.devices.targets import Target
from retrograd.pipelines.stages.staged import ExecutableStore, Progress, StagedModule
from retrograd.pipelines.toolchain.executable import Executable
from retrograd.repair import Rebuild, Rebuilt
from retrograd.runtime.arguments.index_bounds import IndexCheck
from retrograd.runtime.programs.executor import Program
from retrograd.runtime.steps.compiled import Portable
from retrograd.runtime.steps.islands import IslandTimes
from retrograd.runtime.steps.stage_executor import StageExecutor
from retrograd.stagers import AheadOfTime, AsItRan, Stager, Work
from retrograd.store import open_store

_LOG = logging.getLogger(__name__)


def build(
    captured: Captured,
    options: Options,
    phases: Progress | None = None,
    *,
    portable: bool = False,
    for_loss: bool = False,
    reasons: Mapping[str, str] | None = None,
    seen: Callable[[str], None] = lambda _: None,
) -> Build:
    """Compile a captured graph and load what it became, with islands for what does not compile.

    ``portable`` says whether it has what others than the runtime call, a file for ``iree-run-module``; otherwise that
    is compiled when it is asked for. ``for_loss`` says that where one output is a loss, its backward is enough for the
    time being; that of all outputs is then in ``staged.whole``. ``reasons`` says why which nodes are to be islands in
    any case, by name. ``seen`` is as for :class:`AsItRan`.

    Raises:
        CaptureError: an op that cannot be imported, or has no compiled form, without a fallback.
        PipelineError, CompileError: it cannot be compiled; names the op. Or a rule of the policy contradicts the model
            or matches nothing.
        InfeasibleBudget: no plan stays within the budget.
        ValueError: a budget for a part of a model, of open sizes.
    """
    options = _uncompared(options) if portable else options
    work = Work(captured, options, phases or Progress(), open_store(options), portable, for_loss)
    stager: Stager = AsItRan(work, seen) if captured.as_it_ran else AheadOfTime(work)
    fallback = Fallback(options.fallback, options.target, work.versions, work.store, reasons)
    (staged, executable, cached), islands = fallback.compile(captured.graph_module, stager.stage, stager.finish)
    with work.phases.phase("load"):
        program = Program.load(executable.vmfb, driver=options.uri, needs_device=options.needs_device)
    return Build(
        work=work,
        staged=staged,
        executable=executable,
        program=program,
        specs=function_specs(staged, executable),
        cached=cached,
        times=IslandTimes(islands),
        compile_portable=partial(_compile_portable, work, staged, executable),
        checks=_checks_of(options, work.store) if options.verify else None,
        plan=stager.plan,
    )


def _uncompared(options: Options) -> Options:
    """Options for what goes to a file: nothing compares what others run."""
    return replace(options, target=replace(options.target, is_compared=False))


def _compile_portable(work: Work, staged: StagedModule, executable: Executable) -> Portable:
    if work.portable:
        return Portable(executable.vmfb)
    work = replace(work, options=_uncompared(work.options))
    if uses_libraries(work.captured.graph_module):
        # No library computes anything in a file.
        graph_module = write_out(work.captured.graph_module, work.options.libraries)
        return _compile_anew(replace(work, captured=replace(work.captured, graph_module=graph_module)))
    if staged.memory_budget is not None and staged.whole is not None:
        # What keeps the budget in stages may not do so in one piece.
        return _compile_anew(work)
    # The same kernels, so with the same flags.
    same = replace(work.options, target=work.options.target.only(executable.flags))
    whole, filed, _ = replace(work, options=same, phases=Progress(), portable=True).compile(staged.whole or staged)
    if staged.whole is None:
        return Portable(filed.vmfb)
    return _describe_filed(whole, filed)


def _compile_anew(work: Work) -> Portable:
    """A program of functions in one piece, compiled from the graph anew.

    Raises:
        InfeasibleBudget: none stays within the budget.
    """
    stager = AheadOfTime(replace(work, phases=Progress(), portable=True))
    whole, filed, _ = stager.finish(stager.stage(()))
    return _describe_filed(whole, filed)


def _describe_filed(whole: StagedModule, filed: Executable) -> Portable:
    """Returns what a file is to hold, with functions of its own."""
    functions = function_specs(whole, filed)
    return Portable(filed.vmfb, (functions[FORWARD], functions[BACKWARD]), describe_memory(whole, filed))


def _checks_of(options: Options, store: ExecutableStore | None) -> Checks:
    return Checks(options, store, Rebuild(options.target, partial(rebuild_function, options)))


def tell_notes(built: Build) -> None:
    """Warn of what the compiler had to note."""
    for note in built.executable.notes:
        warn_user(note, UserWarning)


def build_functions(captured: Captured, options: Options) -> Mapping[str, CompiledFunction]:
    """Compile a graph that Dynamo captured; returns what it became, the two halves of a joint graph or itself, by name.

    Raises:
        CaptureError, PipelineError, CompileError, InfeasibleBudget, ValueError: as :func:`build`.
    """
    # Who compiles through Dynamo gives no listener, and measuring takes its time.
    built = build(captured, options, Progress(_LOG.info) if options.tuning is not None else None)
    tell_notes(built)
    functions = {f.name: built.function(f.name) for f in built.staged.functions}
    return functions | {FORWARD: refusing_wrong_indices(functions[FORWARD], captured.graph_module)}


def rebuild_function(
    options: Options, graph_module: torch.fx.GraphModule, name: str, target: Target, reasons: Mapping[str, str]
) -> Rebuilt:
    """Compile a graph as one function by itself, for a target of one's own, with islands for the nodes that ``reasons``
    names. It keeps no memory budget, and what it saves for a backward is what the graph gives.

    Raises:
        CaptureError, PipelineError, CompileError: it cannot be compiled.
    """
    described = describe_graph(graph_module)
    # Where it ran is here, and it is checked by whoever repairs.
    here = replace(options, target=target, partition=DEFAULT, fallback="island", verify=False, needs_device=True)
    built = build(Captured(described, name), here, reasons=reasons)
    function = built.function(name)
    function = refusing_wrong_indices(function, described) if name == FORWARD else function
    return Rebuilt(function, built.staged, built.executable)


# By options and the text of the module: a backward is captured anew for reasons that do not change its graph.
_EXECUTORS: WeakValueDictionary[tuple[Options, str], StageExecutor] = WeakValueDictionary()


class _Known(Exception):
    """A graph is that of a backward compiled before."""

    def __init__(self, executor: StageExecutor) -> None:
        super().__init__()
        self.executor = executor


def build_backward(traced: TracedBackward, request: BackwardRequest) -> tuple[StageExecutor, bool]:
    """Compile a backward that was captured as it ran; also says whether its graph was compiled before.

    Raises:
        CaptureError, PipelineError, CompileError: it cannot be compiled; names the op.
    """
    options = request.on(_device_of(traced.graph_module))
    texts: list[str] = []

    def seen(text: str) -> None:
        texts.append(text)
        if (known := _EXECUTORS.get((options, text))) is not None:
            raise _Known(known)

    try:
        built = build(traced.captured, options, seen=seen)
    except _Known as known:
        return known.executor, True
    if built.plan is None:
        raise AssertionError("a backward that was captured as it ran has a plan")
    tell_notes(built)
    islands = built.times.islands
    executor = StageExecutor(built.plan, built.program, [*built.specs.values()], islands)
    # A loop has an island for each of its turns, and one reason.
    counts = Counter(island.text for island in islands)
    executor.notes = tuple(f"runs in torch: {text}" + (f" ({n} times)" if n > 1 else "") for text, n in counts.items())
    executor.notes += (*built.staged.notes, *built.executable.notes)
    executor.is_rearranged = bool(built.staged.notes)
    executor.is_in_order = traced.captured.in_order or options.hook_schedule == "eager-order"
    if not islands:
        _EXECUTORS[options, texts[-1]] = executor
    return executor, False


def _device_of(graph_module: torch.fx.GraphModule) -> torch.device:
    """Where a graph's arguments are: on a CUDA device where any of them is."""
    places = [
        value.device
        for node in graph_module.graph.find_nodes(op="placeholder")
        if isinstance(value := node.meta.get("val"), torch.Tensor)
    ]
    return next((place for place in places if place.type == "cuda"), torch.device("cpu"))


# -- Indices ----------------------------------------------------------------------------------------------------------

# Graphs of Dynamo's, which have no signature: their indices are looked at where they are called.


def refusing_wrong_indices(function: CompiledFunction, traced: torch.fx.GraphModule) -> CompiledFunction:
    """``function``, compiled from ``traced``, which refuses arguments of the graph that are indices out of range.
    Raises when called: IndexError: one is not."""
    placeholders = [node.name for node in traced.graph.find_nodes(op="placeholder")]
    places = {name: place for place, name in enumerate(function.arguments)}
    checks = [
        (places[placeholders[bound.argument]], IndexCheck(bound))
        for bound in find_index_bounds(traced.graph)
        if placeholders[bound.argument] in places
    ]
    if not checks:
        return function

    def call(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        for place, check in checks:
            problem = check.find_problem(tensors[place])
            if problem is not None:
                raise IndexError(f"{function.arguments[place]} of a compiled graph: {problem}")
        return function.call(tensors)

    return replace(function, call=call)
