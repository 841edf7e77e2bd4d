# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Traces a backward for all sizes that differ from step to step as they did so far."""

from __future__ import annotations

from retrograd.frontend.autograd.engine.python_calls import Frame
from retrograd.frontend.autograd.hooks.hook_inlining import find_sites
from retrograd.frontend.autograd.hooks.open_hooks import HookStays
from retrograd.frontend.autograd.sizes.open_sizes import OpenPlaces, OpenSizes
from retrograd.frontend.autograd.sizes.skeleton import Skeleton
from retrograd.frontend.autograd.steps.recompile_reasons import Situation
from retrograd.frontend.autograd.steps.recorder import Recorder
from retrograd.frontend.autograd.steps.step_key import StepKey
from retrograd.frontend.autograd.steps.variants import CompiledStructure, Numbering, Variant, kind_of
from retrograd.frontend.autograd.tracing.trace import TracedBackward, trace_backward


def trace_variant(
    structure: CompiledStructure,
    skeleton: Skeleton,
    recorder: Recorder,
    frame: Frame,
    key: StepKey,
    situation: Situation,
    numbering: Numbering,
) -> Variant:
    """Trace a recorded backward with its sizes open. Hooks that are marked are part of it, if their code runs on open
    sizes; not those that unpack saved tensors.

    Raises:
        CaptureError: sizes cannot be left open. Besides, whatever else fails in tracing.
    """
    sites = find_sites(recorder.capture.graph)
    called = {name: "what it unpacks may have any size" for name, site in sites.items() if site.packed is not None}
    while True:
        watched = recorder.with_calls(called)
        sizes = OpenSizes(structure)
        try:
            traced = trace_backward(watched, frame.inputs, key.sizes, frame.scalars, OpenPlaces(sizes, skeleton))
            break
        except HookStays as stays:
            called[stays.node] = stays.reason
    notes = (*watched.notes, *_describe(sizes, traced, situation, skeleton))
    kind, samples = kind_of(key, numbering), len(structure.samples)
    return Variant(kind, traced, situation, notes, numbering, structure, samples, called)


def _describe(sizes: OpenSizes, traced: TracedBackward, situation: Situation, skeleton: Skeleton) -> list[str]:
    """Say in words which sizes are open."""
    assert traced.guard is not None
    tensors = [situation.tensors[number][0] for number in skeleton.inputs]
    return [f"from now on for any {size}" for size in sizes.describe(traced.guard.names, tensors, skeleton)]
