# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tell who has a gradient when it is accumulated: whoever has it alone may keep its memory."""

from __future__ import annotations

from collections import Counter
from enum import Enum, auto

from retrograd.contract.hooks import POST
from retrograd.contract.plan import AccumulateGrad, CallHook, RunStage, StagePlan, Step, gives, uses


class Owner(Enum):
    """Who has a gradient when it is accumulated: its accumulation alone, somebody else too, or only a run tells."""

    ACCUMULATION = auto()
    OTHERS = auto()
    RUN_TELLS = auto()


def find_owners(plan: StagePlan) -> list[Owner]:
    """Find, for each accumulation in order, who has its gradient.

    What a stage gives is in memory of its own. What Python gave, and what is seen once more, in a post hook of the node
    that accumulates (the one kind of hook that takes what is accumulated and gives nothing), a run tells.
    """
    made = {name for step in plan.steps if isinstance(step, RunStage) for name in step.results}
    used = Counter(plan.results)
    for step in plan.steps:
        used.update(uses(step))
    later: Counter[str] = Counter(plan.results)
    owners: list[Owner] = []
    for step in reversed(plan.steps):
        if isinstance(step, AccumulateGrad):
            name = step.gradient
            if later[name]:
                owners.append(Owner.OTHERS)
            else:
                owners.append(Owner.ACCUMULATION if name in made and used[name] == 1 else Owner.RUN_TELLS)
        if not _is_last_look(step):
            later.update(uses(step))
    return owners[::-1]


def _is_last_look(step: Step) -> bool:
    is_post_hook = isinstance(step, CallHook) and step.kind == POST
    # It may take others too, which it has to wait for.
    return is_post_hook and bool(uses(step)) and not gives(step)
