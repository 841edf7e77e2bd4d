# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Cuts the functions of a staged module into stages, so that its values live no longer than they have to."""

from __future__ import annotations

from dataclasses import replace

from retrograd.contract.roles import BACKWARD
from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.infra.runner import run_passes
from retrograd.pipelines.stages.stage_plan import read_island_plans
from retrograd.pipelines.stages.stage_steps import LIFETIMES, passes_of
from retrograd.pipelines.stages.staged import StagedModule, read_interfaces
from retrograd.pipelines.transforms.torch.bwd_shorten_lifetimes import BwdShortenLifetimes


def shorten_lifetimes(staged: StagedModule, gain: int, floor: int = 0) -> StagedModule:
    """``staged`` with its functions cut where ``bwd-shorten-lifetimes`` finds that this lowers the peak of a step;
    itself where it does not, where it has no backward, and where functions are cut already, at what runs in torch.
    ``gain`` are the bytes that this has to save, and ``floor`` those that a step takes in any case.

    Raises:
        PipelineError: a pass refused the module; names the op.
    """
    if staged.plans or all(function.name != BACKWARD for function in staged.functions):
        return staged
    with make_context(), ir.Location.unknown():
        module = ir.Module.parse(staged.source)
        run_passes(module, passes_of(LIFETIMES, BwdShortenLifetimes(gain=gain, floor=floor)))
        plans = read_island_plans(module.operation)
        if not plans:
            return staged
        return replace(
            staged,
            texts={**staged.texts, "scheduled": str(module)},
            source=module.operation.get_asm(enable_debug_info=True),
            plans=plans,
            stages=read_interfaces(module),
            whole=staged.whole or staged,
        )
