# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Repairs a compiled function that gives wrong values, beside the training.

The graph of the function is compiled by itself, with the sets of flags that come after those that went wrong; the first
one that gives what the graph gives in torch is taken. The op at fault is looked for in any case, to be named, and where
no flags help, it becomes an island, and so does the next one.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from retrograd.bisection import Bisection, find_fault
from retrograd.frontend.autograd.engine.background import BackgroundWork
from retrograd.frontend.doors.call_plan import Caller
from retrograd.frontend.doors.graph_calls import CompiledFunction
from retrograd.frontend.islands.eager_values import EagerValues, record_run
from retrograd.frontend.islands.island_choice import can_be_island, draws_numbers
from retrograd.frontend.python.source_locations import CaptureError
from retrograd.frontend.sizes.size_nodes import SYMBOLIC
from retrograd.frontend.verification.first_call import Fault
from retrograd.pipelines.devices.device_targets import DATA_TILING, SHARED_BINDINGS
from retrograd.pipelines.devices.targets import Target
from retrograd.pipelines.infra.diagnostics import PipelineError
from retrograd.pipelines.infra.errors import CompileError
from retrograd.pipelines.stages.staged import StagedModule
from retrograd.pipelines.toolchain.executable import Executable

# Ops at fault that become islands before a repair is given up.
_MOST_ISLANDS = 4
# What a compilation, and a run of what it gave, end with.
_FAILURES = (CaptureError, PipelineError, CompileError, RuntimeError, ValueError, KeyError)


@dataclass(frozen=True)
class Rebuilt:
    """A graph compiled by itself: the function, and what it was compiled from and to."""

    function: CompiledFunction
    staged: StagedModule
    executable: Executable


@dataclass(frozen=True)
class Rebuild:
    """Compiles a graph by itself, for ``target``: ``compile`` takes the graph, the name of the function, a target and
    why which nodes are to be islands."""

    target: Target
    compile: Callable[[GraphModule, str, Target, Mapping[str, str]], Rebuilt]


@dataclass(frozen=True)
class Outcome:
    """Holds the result of a repair: a function that is right, if one was found, and what there is to say."""

    function: CompiledFunction | None
    text: str


@dataclass(frozen=True)
class Case:
    """A function of a staged module, the executable that it was compiled to, and the call on which it was wrong."""

    name: str
    staged: StagedModule
    executable: Executable
    fault: Fault
    rebuild: Rebuild


def can_repair(fault: Fault) -> bool:
    """Whether the graph can be compiled by itself and compared anew: none of its arguments are absent, its sizes are
    fixed, and it draws no numbers in torch's own way, of which a run in another thread would take some."""
    if fault.graph.fill_in is not tuple:
        return False
    sizes = [
        size
        for node in fault.graph.module.graph.find_nodes(op="placeholder")
        for size in getattr(node.meta.get("val"), "shape", (node.meta.get("val"),))
    ]
    return not any(isinstance(size, SYMBOLIC) for size in sizes) and not draws_numbers(fault.graph.module)


class RepairWork:
    """A repair in the background; ``bind`` makes what is called of a function, ``say`` tells the user."""

    def __init__(self, case: Case, bind: Callable[[CompiledFunction], Caller], say: Callable[[str], None]) -> None:
        self._bind, self._say = bind, say
        self._work = BackgroundWork(lambda: repair(case, say))

    @property
    def is_done(self) -> bool:
        """Whether there is a result."""
        return self._work.is_done

    def result(self) -> Caller | None:
        """Returns what to call from now on, or ``None`` where nothing was found; waits for it, and tells the user."""
        outcome = self._work.result()
        self._say(outcome.text)
        return None if outcome.function is None else self._bind(outcome.function)


def repair(case: Case, say: Callable[[str], None]) -> Outcome:
    """Look for code that gives what the graph gives; ``say`` is told which op is at fault, once that is known."""
    try:
        return _repair(case, say)
    except _FAILURES as error:
        return Outcome(None, f"@{case.name} stays in torch: no other code was found ({_first_line(error)})")


def _repair(case: Case, say: Callable[[str], None]) -> Outcome:
    name, fault, rebuild = case.name, case.fault, case.rebuild
    values = record_run(fault.fixed, fault.arguments)
    for flags in find_other_flags(rebuild.target, case.executable.flags):
        try:
            built = rebuild.compile(fault.graph.module, name, rebuild.target.only(flags), {})
        except (PipelineError, CompileError):
            # The next set may do.
            continue
        if _is_right(built, fault, values):
            shown = " ".join(built.executable.flags) or "no optimization flags"
            # To name the op takes many compilations more, for which the training need not wait.
            BackgroundWork(lambda: say(f"@{name} was wrong{_name_op(case, values)[1]}"))
            return Outcome(built.function, f"@{name} is compiled with {shown} instead, which is right")
    return _repair_by_islands(case, values)


def find_other_flags(target: Target, failed: Sequence[str]) -> list[tuple[str, ...]]:
    """The sets of flags of a target that come after those that went wrong."""
    sets = [_without_packing(flags) for flags in target.ladder]
    wrong = _without_packing(failed)
    start = sets.index(wrong) + 1 if wrong in sets else 0
    other = [flags for flags, plain in zip(target.ladder[start:], sets[start:], strict=True) if plain != wrong]
    return list(dict.fromkeys(other))


def _without_packing(flags: Sequence[str]) -> frozenset[str]:
    """Returns what a set of flags asks for, whatever the module: data tiling is left out where it is of no use."""
    return frozenset(flags) - {DATA_TILING, SHARED_BINDINGS}


def _repair_by_islands(case: Case, values: EagerValues) -> Outcome:
    """Have the op at fault run in torch, and the next one that is found in what is compiled then."""
    name, fault, rebuild = case.name, case.fault, case.rebuild
    able = {node.name for node in fault.graph.module.graph.nodes if can_be_island(node)}
    reasons: dict[str, str] = {}
    found, told = _name_op(case, values)
    while found is not None and found.value in able - reasons.keys() and len(reasons) < _MOST_ISLANDS:
        reasons[found.value] = "its compiled code gives wrong values"
        built = rebuild.compile(fault.graph.module, name, rebuild.target, reasons)
        if _is_right(built, fault, values):
            return Outcome(built.function, f"{', '.join(reasons)} of @{name} runs in torch{told}")
        found, told = _name_op(replace(case, staged=built.staged, executable=built.executable), values)
    return Outcome(None, f"@{name} stays in torch: no other code was found{told}")


def _name_op(case: Case, values: EagerValues) -> tuple[Bisection | None, str]:
    """The op at fault, and what there is to say of it, with the path of a reproducer."""
    staged = case.staged
    stages = staged.plans[case.name].stages if case.name in staged.plans else (case.name,)
    try:
        found = find_fault(staged, case.rebuild.target, values, case.executable, stages)
    except _FAILURES as error:
        return None, f". The op at fault was not found: {_first_line(error)}"
    if not found.op:
        return None, f". The op at fault was not found: {found}"
    digest = hashlib.sha256(f"{found}{staged.source}".encode()).hexdigest()[:16]
    script = found.write(Path(tempfile.gettempdir()) / f"retrograd-fault-{digest}")
    return found, f". {found}\n  reproducer: {script}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _is_right(built: Rebuilt, fault: Fault, values: EagerValues) -> bool:
    """Whether a function gives what the graph gave."""
    function = built.function
    given = [values.tensors[value].detach().clone() for value in function.arguments]
    computed = dict(zip(function.results, function.call(given), strict=True))
    results: list[Any] = [
        computed.get(node.name) if isinstance(node, torch.fx.Node) else None for node in fault.graph.results()
    ]
    return fault.find_difference(results) is None
