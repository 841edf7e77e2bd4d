# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The stages up to ``scheduled``: each by name, and the passes that lead to it from the one before."""

from __future__ import annotations

from dataclasses import dataclass

from retrograd.pipelines.infra.passes import ModulePass


@dataclass(frozen=True)
class StageStep:
    """A pass as a pipeline has it, and why it is there, and stands there. One of that name that is made for a module,
    with values and options of its own, is run in its place."""

    name: str
    why: str


_VERIFY = StageStep("bwd-verify-legality{level=imported}", "later passes rely on the form of the stage")
_VERIFY_STAGED = StageStep("bwd-verify-legality{level=staged}", "no op is left that the lowering does not take")
_TO_FUNC = StageStep("convert-bwd-to-func", "marks of saved values and of recomputation become plain results and ops")
_CSE = StageStep("bwd-cse", "what is computed twice costs twice; before plans, which count it")

# What precedes them where the user has rules on what to save.
MARKS = (StageStep("bwd-apply-save-policy", "rules are about ops as they were imported; before any of them is merged"),)
_COLLECTIVES = StageStep(
    "convert-torch-collectives-to-bwd", "a collective is one op, with the wait for it, before halves are told apart"
)
_SPLIT = StageStep("bwd-split-collectives", "between start and wait others can compute; when nothing is saved any more")
_BUCKETS = StageStep("bwd-bucket-reductions", "where the user asks for it; before the order, which counts starts")
_PREFETCH = StageStep("bwd-prefetch-gathers", "where the user asks for it; of the order that was chosen")
STAGES: dict[str, tuple[StageStep, ...]] = {
    "imported": (_COLLECTIVES, _VERIFY),
    "partitioned": (
        _CSE,
        StageStep("bwd-partition", "decides what is saved; cuts @joint into @forward and @backward"),
        StageStep("bwd-narrow-saved", "packs what a rule or hooks say; when it is known what is saved"),
        StageStep(
            "bwd-offload-saved", "which residuals go to the host; when all that is saved is there, as it is saved"
        ),
        StageStep("bwd-sink-recompute", "what is computed again is so late; on the whole backward, packing included"),
        _VERIFY,
    ),
    "scheduled": (_TO_FUNC, _VERIFY_STAGED),
}
# What follows where ops run in torch, or processes work together: functions are cut there.
ISLANDS = (
    _SPLIT,
    _BUCKETS,
    StageStep("bwd-schedule-collectives", "communication begins early, and is waited for late"),
    _PREFETCH,
    StageStep("bwd-outline-islands", "functions are cut where ops run in torch"),
    _TO_FUNC,
    _VERIFY_STAGED,
)
# What follows else, where it is asked for.
LIFETIMES = (
    StageStep("bwd-shorten-lifetimes", "cuts functions where that lowers the peak; when all is decided"),
    _VERIFY_STAGED,
)
# What "partitioned" goes through once more for a backward that leaves out outputs, before "scheduled".
LEFT_OUT = (
    StageStep("bwd-drop-tangents", "a loss that leaves out outputs has no tangents of these; what is saved is settled"),
)
# The same for a backward that was captured as it ran: it has hooks, and nothing to partition.
BACKWARD_STAGES: dict[str, tuple[StageStep, ...]] = {
    "imported": (
        StageStep("convert-torch-operator-to-bwd", "hooks and opaque calls become ops of bwd"),
        _COLLECTIVES,
        _VERIFY,
    ),
    "ordered": (
        StageStep("bwd-inline-hooks", "hooks that are pure become a part of the backward; before what merges ops"),
        _CSE,
        _SPLIT,
        _BUCKETS,
        StageStep("bwd-schedule-hooks", "decides when hooks run, by the policy"),
        _PREFETCH,
        _VERIFY,
    ),
    "scheduled": (
        StageStep("bwd-outline-stages", "functions are cut where Python is called"),
        _TO_FUNC,
        _VERIFY_STAGED,
    ),
}


def passes_of(steps: tuple[StageStep, ...], *made: ModulePass) -> list[str | ModulePass]:
    """The passes of these steps, in order; those that were made for a module in place of theirs."""
    by_name = {pass_.name: pass_ for pass_ in made}
    return [by_name.get(step.name, step.name) for step in steps]
