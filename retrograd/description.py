# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Describes a build: its manifest, its functions, the releases that it was made with."""

from __future__ import annotations

from collections import Counter
from typing import Any

from retrograd.built import Build, function_specs
from retrograd.contract.manifest import FORMAT_VERSION, Manifest
from retrograd.contract.plan import StartCollective
from retrograd.contract.roles import BACKWARD, FORWARD, INTO, SAVED
from retrograd.contract.sizes import DynamicSize
from retrograd.frontend.doors.capture import CapturedGraph
from retrograd.frontend.libraries.kernel_calls import REFUSED
from retrograd.held_values import describe_fullest, describe_timeline
from retrograd.pipelines.stages.offloading import moved_bytes
from retrograd.pipelines.stages.peaks import step_peak, unknown_scratch
from retrograd.pipelines.stages.staged import StagedModule
from retrograd.pipelines.toolchain.executable import Executable


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
        **_describe_shared(built),
        "compile_seconds": {phase: round(seconds, 4) for phase, seconds in phases.seconds.items()},
    }
    if captured.sizes.sizes:
        report["sizes"] = [_describe_size(size) for size in captured.sizes.sizes]
        del report["timeline"], report["fullest"]
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


def _describe_shared(built: Build) -> dict[str, int]:
    """Bytes of the most gradients that lie in one storage, which is there as long as one of them."""
    if BACKWARD + INTO not in built.executable.placed:
        return {}
    shared = Counter[int]()
    for place in built.program.donated(BACKWARD + INTO)[1]:
        shared[place.argument] += 0 if place.is_copied else place.size
    return {"shared_gradient_bytes": max(shared.values())} if any(shared.values()) else {}


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
        "timeline": describe_timeline(staged, executable),
        "fullest": describe_fullest(staged, executable),
    }


def _describe_size(size: DynamicSize) -> str:
    most = "" if size.most is None else f" to {size.most}"
    return f"{size.name} = {size.hint} ({size.least}{most or ' or more'})"
