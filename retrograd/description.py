# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is told of a build: its manifest, its functions, the releases that it was made with."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from retrograd.contract.manifest import FORMAT_VERSION, PACKAGES, Manifest
from retrograd.contract.roles import BACKWARD, FORWARD, GRAD, INTO, MUTATION, OUTPUT, SAVED
from retrograd.contract.sizes import DynamicSize
from retrograd.contract.tensors import FunctionSpec
from retrograd.frontend.capture import CapturedGraph
from retrograd.options import Options
from retrograd.pipelines.budgeted import port_bytes, step_peak, unknown_scratch
from retrograd.pipelines.executable import Executable
from retrograd.pipelines.staged import Progress, StagedModule

if TYPE_CHECKING:
    from retrograd.built import Build


def describe(captured: CapturedGraph, built: Build, options: Options, name: str, phases: Progress) -> Manifest:
    """What is told of a build: by its file to who loads it, by `explain()` to who compiled it."""
    forward, backward = built.specs[FORWARD], built.specs[BACKWARD]
    dynamic = bool(captured.sizes.sizes)
    known = not unknown_scratch(built.staged, built.executable.transients)
    report = {
        "name": name,
        "target": options.target.name,
        "notes": list(built.executable.notes),
        "flags": list(built.executable.flags),
        "kernels": list(built.executable.kernels),
        "cached": built.cached,
        "stages": len(built.staged.stages),
        "saved_values": sum(a.role == SAVED for a in backward.arguments),
        **built.staged.partition,
        "partition": options.partition,
        # At the sizes of the trace.
        "forward_transient_bytes": forward.transient_bytes if known else None,
        "backward_transient_bytes": backward.transient_bytes if known else None,
        "peak_bytes_predicted": step_peak(built.staged, built.executable.transients) if known else None,
        "peak_bytes_measured": None,
        "vmfb_bytes": len(built.executable.vmfb),
        "compile_seconds": {phase: round(seconds, 4) for phase, seconds in phases.seconds.items()},
    }
    if dynamic:
        report["sizes"] = [_describe_size(size) for size in captured.sizes.sizes]
    else:
        report["timeline"] = {half: _describe_half(half, built) for half in (FORWARD, BACKWARD)}
    functions = (forward, backward)
    return Manifest(
        FORMAT_VERSION,
        functions,
        options.target.names,
        options.partition,
        find_versions(),
        captured.signature,
        report,
    )


def _describe_half(half: str, built: Build) -> dict[str, Any]:
    """What is in memory while a half runs, in bytes: what its caller holds, its scratch memory, its steps."""
    shown = {OUTPUT: "outputs", MUTATION: "updated buffers", SAVED: "residuals", GRAD: "gradients"}
    # The backward runs while the forward's results are held, less the buffers, which are back in their place.
    results = [r for r in built.staged.function(FORWARD).results if half == FORWARD or r.role != MUTATION]
    if half == BACKWARD:
        results += built.staged.function(BACKWARD).results
    held = {name: sum(port_bytes(r) for r in results if r.role == role) for role, name in shown.items()}
    steps = [step.to_list() for step in built.executable.timelines.get(half + INTO, ())]
    return {"held": held, "scratch": built.specs[half].transient_bytes, "steps": steps}


def _describe_size(size: DynamicSize) -> str:
    most = "" if size.most is None else f" to {size.most}"
    return f"{size.name} = {size.hint} ({size.least}{most or ' or more'})"


def function_specs(staged: StagedModule, executable: Executable) -> dict[str, FunctionSpec]:
    """The functions to call, and those that they were cut into where something runs in torch."""
    functions = {f.name: f for f in (*staged.functions, *staged.stages)}.values()
    return {f.name: replace(f, transient_bytes=_scratch(f.name, staged, executable)) for f in functions}


def _scratch(name: str, staged: StagedModule, executable: Executable) -> int:
    """Scratch bytes of a function; of one that was cut, the most that a stage of it takes."""
    stages = staged.plans[name].stages if name in staged.plans else (name,)
    return max((executable.transients.get(stage + INTO, 0) for stage in stages), default=0)


def find_versions() -> dict[str, str]:
    """The releases of what a build is made with."""
    return {key: version(package) for key, package in PACKAGES.items()}
