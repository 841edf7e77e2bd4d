# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Cuts the functions of a staged module into stages, so that its values live no longer than they have to."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from retrograd.contract.roles import BACKWARD
from retrograd.dialects import ir
from retrograd.dialects.context import make_context
from retrograd.pipelines.infra.runner import run_passes
from retrograd.pipelines.stages.stage_plan import read_island_plans
from retrograd.pipelines.stages.stage_steps import LIFETIMES, passes_of
from retrograd.pipelines.stages.staged import StagedModule, read_interfaces
from retrograd.pipelines.transforms.torch.bwd_shorten_lifetimes import BwdShortenLifetimes

_TENSOR = re.compile(r"!torch\.vtensor<\[([\d,]*)\],[a-z]+(\d+)(?:E\dM\d\w*)?>")
_ANY_TENSOR = "!torch.vtensor<"


def most_bytes(scheduled: str) -> float:
    """No fewer bytes than the tensors of a module's text have together; infinite where one has an open size or an
    element of another kind than a number."""
    found = _TENSOR.findall(scheduled)
    if len(found) < scheduled.count(_ANY_TENSOR):
        return math.inf
    return sum(math.prod(map(int, filter(None, sizes.split(",")))) * -(-int(bits) // 8) for sizes, bits in found)


def shorten_lifetimes(staged: StagedModule, gain: int, floor: int = 0) -> StagedModule:
    """``staged`` with its functions cut where ``bwd-shorten-lifetimes`` finds that this lowers the peak of a step;
    itself where it does not, where it has no backward, and where functions are cut already, at what runs in torch.
    ``gain`` are the bytes that this has to save, and ``floor`` those that a step takes in any case.

    Raises:
        PipelineError: a pass refused the module; names the op.
    """
    if staged.plans or all(function.name != BACKWARD for function in staged.functions):
        return staged
    # Most of the modules of tests, and of what is small: to read one takes longer than to schedule it.
    if most_bytes(staged.texts["scheduled"]) < gain:
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
