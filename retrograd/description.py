# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Describes a build: its manifest, its functions, the releases that it was made with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from retrograd.built import Build, function_specs
from retrograd.contract.manifest import FORMAT_VERSION, Manifest
from retrograd.contract.plan import FinishOffload, Free, RunStage, StagePlan, StartCollective, StartFetch
from retrograd.contract.roles import BACKWARD, FORWARD, GRAD, INTO, MUTATION, SAVED
from retrograd.contract.sizes import DynamicSize
from retrograd.contract.tensors import TensorSpec
from retrograd.frontend.doors.capture import CapturedGraph
from retrograd.frontend.libraries.kernel_calls import REFUSED
from retrograd.pipelines.stages.interface import port_bytes
from retrograd.pipelines.stages.offloading import moved_bytes, moving_plans
from retrograd.pipelines.stages.peaks import handed_over, step_peak, unknown_scratch
from retrograd.pipelines.stages.staged import StagedModule
from retrograd.pipelines.toolchain.executable import Executable
from retrograd.runtime.reports.timeline import BETWEEN, HELD


def describe(captured: CapturedGraph, built: Build, name: str) -> Manifest:
    """Describes a build: a file tells who loads it, `explain()` who compiled it."""
    options, phases = built.work.options, built.work.phases
    forward, backward = built.specs[FORWARD], built.specs[BACKWARD]
    report = {
        "name": name,
        "target": options.target.name,
        "notes": list(built.executable.notes),
        **({"collectives": lines} if (lines := describe_collectives(built.staged)) else {}),
        "flags": list(built.executable.flags),
        "kernels": [*built.executable.kernels, *captured.graph_module.meta.get(REFUSED, ())],
        "cached": built.cached,
        "saved_values": sum(a.role == SAVED for a in backward.arguments),
        **_describe_offloaded(built.staged),
        **built.staged.partition,
        "partition": options.partition,
        **describe_memory(built.staged, built.executable),
        "compile_seconds": {phase: round(seconds, 4) for phase, seconds in phases.seconds.items()},
    }
    if captured.sizes.sizes:
        report["sizes"] = [_describe_size(size) for size in captured.sizes.sizes]
        del report["timeline"]
    functions = (forward, backward)
    return Manifest(
        FORMAT_VERSION,
        functions,
        options.target.names,
        options.partition,
        built.work.versions,
        captured.signature,
        report,
    )


def describe_collectives(staged: StagedModule) -> list[str]:
    """Says of each half which collectives it starts, and what was joined and moved; nothing where there are none."""
    lines = []
    for half, plan in staged.plans.items():
        starts = [step for step in plan.steps if isinstance(step, StartCollective)]
        counts = Counter(f"{s.collective} ({s.reduction})" if s.reduction else s.collective for s in starts)
        lines += [f"@{half}: {number} times {what}" for what, number in counts.items()]
    return [*lines, *staged.notes]


def _describe_offloaded(staged: StagedModule) -> dict[str, int]:
    moved = moved_bytes(staged)
    return {"offloaded_values": len(moved), "offloaded_bytes": sum(moved.values())} if moved else {}


def describe_memory(staged: StagedModule, executable: Executable) -> dict[str, Any]:
    """Describes an executable's functions and the memory that they take, at the sizes of the trace."""
    known = not unknown_scratch(staged, executable.transients)
    specs = function_specs(staged, executable)
    return {
        "stages": len(staged.stages),
        "forward_transient_bytes": specs[FORWARD].transient_bytes if known else None,
        "backward_transient_bytes": specs[BACKWARD].transient_bytes if known else None,
        "peak_bytes_predicted": step_peak(staged, executable.working) if known else None,
        "peak_bytes_measured": None,
        "vmfb_bytes": len(executable.vmfb),
        "timeline": {half: _describe_half(half, staged, executable) for half in (FORWARD, BACKWARD)},
    }


def _describe_half(half: str, staged: StagedModule, executable: Executable) -> list[dict[str, Any]]:
    """Lists, in bytes, what is in memory while each stage of a half runs: what its caller holds, its scratch memory,
    its steps. A half that is not cut is one stage."""
    # The backward runs while the forward's results are held, less the buffers, which are back in their place.
    results = [r for r in staged.function(FORWARD).results if half == FORWARD or r.role != MUTATION]
    moved, plan = moved_bytes(staged), {**staged.plans, **moving_plans(staged)}.get(half)
    if plan is not None:
        handed = handed_over(staged) if half == BACKWARD else {}
        kept = [r for r in results if half == BACKWARD and (r.role != SAVED or r.value not in {*handed, *moved})]
        return [*_describe_stages(half, plan, staged, executable, _held(kept), handed)]
    if half == BACKWARD:
        results += staged.function(BACKWARD).results
    held = Counter(_held(results))
    # Those that lie in residuals take no memory.
    held[HELD[GRAD]] -= executable.placed.get(half + INTO, 0)
    return [_describe_stage(half, executable, held)]


def _describe_stages(
    half: str,
    plan: StagePlan,
    staged: StagedModule,
    executable: Executable,
    held: Mapping[str, int],
    handed: Mapping[str, int],
) -> Iterator[dict[str, Any]]:
    function = staged.function(half)
    stages = {stage.name: stage for stage in (*staged.functions, *staged.stages)}
    kinds = {value: HELD[r.role] for value, r in zip(plan.results, function.results, strict=True)}
    places = zip(plan.arguments, function.arguments, strict=True)
    alive = {value: (HELD[SAVED], handed[a.value]) for value, a in places if a.value in handed}
    for step in plan.steps:
        if isinstance(step, Free | FinishOffload):
            for value in step.values:
                alive.pop(value, None)
        elif isinstance(step, StartFetch):
            alive |= {value: (HELD[SAVED], size) for value, size in zip(step.results, step.bytes, strict=True)}
        elif isinstance(step, RunStage):
            for value, result in zip(step.results, stages[step.function].results, strict=True):
                alive[value] = (kinds.get(value, BETWEEN), port_bytes(result))
            counts = Counter(held)
            for kind, size in alive.values():
                counts[kind] += size
            yield _describe_stage(step.function, executable, counts)


def _describe_stage(function: str, executable: Executable, held: Mapping[str, int]) -> dict[str, Any]:
    steps = [step.to_list() for step in executable.timelines.get(function + INTO, ())]
    return {"held": dict(held), "scratch": executable.transients.get(function + INTO, 0), "steps": steps}


def _held(results: Sequence[TensorSpec]) -> dict[str, int]:
    return {name: sum(port_bytes(r) for r in results if r.role == role) for role, name in HELD.items()}


def _describe_size(size: DynamicSize) -> str:
    most = "" if size.most is None else f" to {size.most}"
    return f"{size.name} = {size.hint} ({size.least}{most or ' or more'})"
