# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Holds what is compiled of a captured backward, and says for which of its steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from retrograd.frontend.autograd.engine.background import BackgroundWork
from retrograd.frontend.autograd.engine.python_calls import Frame
from retrograd.frontend.autograd.engine.trials import Trial
from retrograd.frontend.autograd.sizes.open_sizes import SizeGuard, ones_of
from retrograd.frontend.autograd.sizes.structure import Structure
from retrograd.frontend.autograd.steps.direct_step import DirectStep, find_direct_step
from retrograd.frontend.autograd.steps.guards import StepGuard
from retrograd.frontend.autograd.steps.python_side import Compiled, run_compiled
from retrograd.frontend.autograd.steps.recompile_reasons import Situation
from retrograd.frontend.autograd.steps.recorder import Recorder
from retrograd.frontend.autograd.steps.rehearsal import Rehearsal
from retrograd.frontend.autograd.steps.resumption import Kept
from retrograd.frontend.autograd.steps.shared_memory import MergedGuard
from retrograd.frontend.autograd.steps.step_key import StepKey
from retrograd.frontend.autograd.tracing.trace import TracedBackward

# Of so many steps that lie otherwise than what was compiled takes, no other is looked at.
MOST_LOOKS = 8


@dataclass(frozen=True)
class Numbering:
    """Says in what captures of one structure may differ: how many inputs there are; the numbers of those that are
    computed with, in the order that all captures of the structure have them in; the nodes of its opaque calls; and what
    it holds of its own."""

    count: int
    used: tuple[int, ...]
    calls: tuple[str, ...]
    held: Hashable


@dataclass
class CompiledStructure(Structure):
    """A structure and what was compiled of it with open sizes, of any capture."""

    variants: list[Variant] = field(default_factory=list)

    def refuse(self, reason: str) -> None:
        """Refuse a structure, and drop what was compiled for it."""
        self.variants.clear()
        super().refuse(reason)


@dataclass
class Variant:
    """A compiled backward, for one set of sizes or for all that its guard lets through.

    ``kind`` are the options and numbers that it is for, ``situation`` what it was first met with, and ``numbering`` how
    the capture numbers its inputs. Where sizes are open, ``structure`` is what was known of them, with so many
    ``samples``, and ``called`` are the marked hooks that are called in Python for that. It is built by ``work`` if that
    is done in the background. ``right`` says, for each set of sizes of 1 that was tried, whether it then gives what
    eager does; ``is_gone``, that it is not to be used, whatever it gives.
    """

    kind: Hashable
    traced: TracedBackward
    situation: Situation
    notes: tuple[str, ...]
    numbering: Numbering
    structure: CompiledStructure | None = None
    samples: int = 0
    called: Mapping[str, str] = field(default_factory=dict)
    work: BackgroundWork[tuple[Compiled, bool]] | None = None
    compiled: Compiled | None = None
    known: bool = False
    right: dict[frozenset[str], bool] = field(default_factory=dict)
    is_gone: bool = False
    # How many of its recorded runs had no gradients to compare with.
    told_nothing: int = 0

    @property
    def guard(self) -> SizeGuard:
        """For which sizes it is, where some are open."""
        assert self.traced.guard is not None
        return self.traced.guard


class Use:
    """A variant that a step of a capture may use, and the open sizes of the step; ``ones`` are those that are 1. The
    ``guard`` holds for most of the steps that it is for; the ``trial`` says how long they take, where that is to be
    known."""

    def __init__(self, variant: Variant, numbering: Numbering, sizes: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.variant, self.sizes = variant, sizes
        self.guard: StepGuard | None = None
        self.trial: Trial | None = None
        # What runs steps that lie as this was compiled for, and how many more steps are looked at for that.
        self.direct: DirectStep | None = None
        self._looks = MOST_LOOKS
        self.ones = ones_of(sizes)
        # Where the variant's capture, if it is another one, has what this one has in these places.
        self._moves = (
            () if numbering == variant.numbering else tuple(zip(variant.numbering.used, numbering.used, strict=True))
        )

    @property
    def is_right(self) -> bool | None:
        """Whether it gives what eager does; None where that was not tried."""
        return self.variant.right.get(self.ones)

    def guard_merged(self, inputs: Sequence[torch.Tensor]) -> MergedGuard | None:
        """Make a guard of how the tensors lie that are taken as others, or without what they repeat; None where none
        are."""
        guard = MergedGuard(self.variant.traced.merged, self.variant.traced.layouts, inputs)
        return guard if guard.numbers else None

    def look_for_direct(self, inputs: Sequence[torch.Tensor]) -> None:
        """Have steps that lie as this one does run directly, if they can: once it is known how functions are called."""
        compiled = self.variant.compiled
        if self.direct is not None or not self._looks or compiled is None or self.guard is None:
            return
        plan = None if self._moves else compiled.find_short_plan()
        if plan is None:
            self._looks = self._looks if not self._moves and compiled.may_be_short else 0
            return
        self._looks -= 1
        self.direct = find_direct_step(self.variant.traced, plan, inputs)
        if self.direct is not None:
            self.guard.look_at_strides(inputs, self.direct.lying)

    def run(self, frame: Frame) -> list[Any]:
        """The results of a step; its frame is not usable afterwards."""
        if self._moves:
            _move(frame, self.variant.numbering.count, self._moves)
        frame.sizes = self.sizes
        assert self.variant.compiled is not None
        return run_compiled(self.variant.traced, self.variant.compiled, frame)

    def kept_inputs(self, frame: Frame) -> Kept:
        """The inputs that a step keeps for Python, by their numbers in the capture whose step it is."""
        if not self._moves:
            return Kept(frame.inputs)
        return Kept({here: frame.inputs[there] for there, here in self._moves if there in frame.inputs})

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.variant.work is None or self.variant.work.is_done


def kind_of(key: StepKey, numbering: Numbering) -> Hashable:
    """Drop sizes from a key, and number the rest as every capture of a structure does."""
    alike = tuple([key.like[number][1:] for number in numbering.used])
    return key.options, key.scalars, alike, numbering.held, key.inlined.without_sizes(numbering.used)


def _move(frame: Frame, count: int, moves: Sequence[tuple[int, int]]) -> None:
    """Number the inputs of a step as another capture does."""
    moved: list[Any] = [None] * count
    for there, here in moves:
        moved[there] = frame.inputs[here]
    # The list that they came in is PyTorch's too, and would hold them.
    frame.inputs.clear()
    frame.inputs = moved


class Rehearsed(NamedTuple):
    """How a compiled backward differs from the recorded run, in words; the results, where Python has no part in it: two
    runs of what is compiled are alike to the last bit, and eager's run is not; whether there was nothing to compare
    with, since the run's gradients are infinite."""

    problem: str | None
    results: list[Any] | None = None
    tells_nothing: bool = False


def rehearse(
    traced: TracedBackward, compiled: Compiled, recorder: Recorder, frame: Frame, *, waits: bool = False
) -> Rehearsed:
    """Compare the compiled backward with the recorded run; nothing where a hook in Python wrote to what it reads since,
    or where it ``waits`` for a run whose gradients are finite. Of others what is finite is compared."""
    rehearsal = Rehearsal(traced, recorder)
    arguments = rehearsal.restore(traced.arguments(frame))
    if arguments is None:
        return Rehearsed(None)
    if waits and rehearsal.tells_nothing:
        return Rehearsed(None, None, True)
    results = compiled.run(arguments, rehearsal)
    problem = rehearsal.find_difference(results)
    if problem is not None or traced.calls.calls or traced.params:
        return Rehearsed(problem)
    return Rehearsed(None, [None if number is None else results[number] for number in traced.results])
