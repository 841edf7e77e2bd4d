# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Backwards of losses that leave out some of the outputs, of a module that is partitioned already. The forward, and
what it saves, stay as they are: a variant takes a part of that."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from retrograd.contract.attributes import BWD_JOINED
from retrograd.contract.roles import BACKWARD, FORWARD, NEW, TANGENT, has_role, name_without_role
from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.infra.functions import find_function
from retrograd.pipelines.infra.runner import run_passes
from retrograd.pipelines.stages.peaks import step_peak
from retrograd.pipelines.stages.stage_steps import LEFT_OUT, STAGES, passes_of
from retrograd.pipelines.stages.staged import Progress, StagedModule, finish_staging
from retrograd.pipelines.transforms.torch.bwd_drop_tangents import BwdDropTangents


def find_tangents(staged: StagedModule) -> tuple[str, ...]:
    """The tangents that ``@backward`` takes, in order, by the names of the captured values."""
    return tuple(a.value for a in staged.function(BACKWARD).arguments if a.role == TANGENT)


def find_left_out(staged: StagedModule) -> frozenset[str]:
    """The tangents that the backward of a loss does without, by the names of the captured values: where one output is a
    number and others are not, as a loss beside the logits, those of the others; and what the model keeps to be looked
    at, in attributes."""
    tangents = [a for a in staged.function(BACKWARD).arguments if a.role == TANGENT]
    kept = [a.value for a in tangents if has_role(NEW, name_without_role(TANGENT, a.name))]
    returned = [a for a in tangents if a.value not in kept]
    others = [a.value for a in returned if a.shape]
    return frozenset((*kept, *others) if len(returned) - len(others) == 1 else kept)


def stage_first(staged: StagedModule, absent: Collection[str], progress: Progress) -> StagedModule:
    """A module that went through all stages with the backward that does without the tangents ``absent`` in the place of
    the whole one, which is in ``whole``; as it is, where that backward would give nothing.

    Raises:
        PipelineError: a pass refused it; names the op.
    """
    first = stage_variant(staged, absent, progress, keep_forward=True)
    if not first.function(BACKWARD).results:
        return staged
    texts = {**staged.texts, "scheduled": first.texts["scheduled"]}
    return replace(first, texts=texts, partition=staged.partition, whole=staged)


def stage_variant(
    staged: StagedModule,
    absent: Collection[str],
    progress: Progress,
    *,
    keep_forward: bool = False,
    are_joined: bool = False,
) -> StagedModule:
    """``@backward`` of a module that went through all stages, without the tangents ``absent``, up to ``scheduled``; the
    forward beside it where that is to be kept. Where residuals ``are_joined``, as another backward takes them, this one
    leaves them as they are.

    Raises:
        PipelineError: a pass refused it; names the op.
    """
    places = [str(place) for place, name in enumerate(find_tangents(staged)) if name in absent]
    with make_context(), ir.Location.unknown():
        module = ir.Module.parse(staged.texts["partitioned"])
        if places:
            with progress.phase("drop tangents"):
                run_passes(module, passes_of(LEFT_OUT, BwdDropTangents(absent=",".join(places))))
        forward = None if keep_forward else find_function(module.operation, FORWARD)
        if forward is not None:
            forward.erase()
        del forward
        texts = {"partitioned": str(module)}
        with progress.phase("schedule"):
            run_passes(module, passes_of(STAGES["scheduled"]))
        if are_joined:
            module.operation.attributes[BWD_JOINED] = ir.UnitAttr.get()
        texts["scheduled"] = str(module)
        return finish_staging(module, texts, {}, progress)


def variant_peak(staged: StagedModule, variant: StagedModule, scratch: Mapping[str, int]) -> int:
    """The peak of live bytes of a step of the forward of ``staged`` and ``variant``; ``scratch`` has the scratch bytes
    of the functions of both."""
    plans = {name: plan for name, plan in staged.plans.items() if name == FORWARD} | variant.plans
    # Of stages that have a name in common, the variant's are the last ones, which count.
    stages = (*staged.stages, *variant.stages)
    functions = (staged.function(FORWARD), *variant.functions)
    return step_peak(replace(staged, functions=functions, plans=plans, stages=stages), dict(scratch))
