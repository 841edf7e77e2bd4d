# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Keeps what was compiled of a captured backward, and finds which variant runs for a step's key."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable

import torch

from retrograd.frontend.autograd.engine.python_calls import Frame
from retrograd.frontend.autograd.sizes.skeleton import Number, Skeleton
from retrograd.frontend.autograd.sizes.structure import Shape, find_fixed
from retrograd.frontend.autograd.steps.history import History
from retrograd.frontend.autograd.steps.step_key import StepKey
from retrograd.frontend.autograd.steps.variants import CompiledStructure, Numbering, Use, kind_of

# A backward of ever new shapes or numbers: beyond this many variants of one capture, further ones run eagerly.
MOST_VARIANTS = 8
# Of how many sets of sizes it is remembered which variant is for them.
MOST_KEYS = 1024


class KnownVariants:
    """The variants of one capture, by the keys of the steps that they run for."""

    def __init__(self, skeleton: Skeleton, nodes: tuple[str, ...], history: History) -> None:
        self._skeleton, self._nodes, self._history = skeleton, nodes, history
        # Which variant runs for a key; None for what runs eagerly.
        self._uses: dict[StepKey, Use | None] = {}
        # The keys that something was compiled for.
        self._compiled: set[StepKey] = set()
        # The tensors that the hooks of a variant read of their own.
        self._reads: dict[StepKey, list[weakref.ref[torch.Tensor]]] = {}
        self._is_full = False

    def __contains__(self, key: StepKey) -> bool:
        return key in self._uses

    @property
    def has_compiled(self) -> bool:
        """Whether something was compiled."""
        return bool(self._compiled)

    def note_compiled(self, key: StepKey) -> None:
        """Count a key that something is compiled for."""
        self._compiled.add(key)

    def note_reads(self, key: StepKey, tensors: Iterable[torch.Tensor]) -> None:
        """Remember the tensors that the hooks of a key's variant read: once one is gone, it can run no more."""
        self._reads[key] = [weakref.ref(tensor) for tensor in tensors]

    def look_up(self, key: StepKey) -> Use | None:
        """Returns what runs for a key, if that is still to be used."""
        use = self._uses.get(key)
        if use is not None and use.variant.is_gone:
            del self._uses[key]
            return None
        return use

    def find(self, key: StepKey, frame: Frame) -> Use | None:
        """A variant of open sizes for those of a step that was not met before; not one that was tried and is wrong.
        That of another capture has to be known to be right: it cannot be tried here."""
        if key in self._uses or not (variants := self.structure(frame).variants):
            return None
        numbering, (shapes, numbers) = self.numbering(frame), self.sizes(frame, key)
        kind = kind_of(key, numbering)
        for variant in variants:
            sizes = variant.guard.read(shapes, numbers) if variant.kind == kind else None
            use = None if sizes is None else Use(variant, numbering, sizes)
            if use is not None and (use.is_right or (use.is_right is None and variant.numbering == numbering)):
                if use.is_right:
                    self.remember(key, use)
                return use
        return None

    def numbering(self, frame: Frame) -> Numbering:
        """The numbers that the capture has for what its variants take and call."""
        skeleton = self._skeleton
        return Numbering(len(frame.inputs), skeleton.inputs, skeleton.calls, skeleton.held)

    def structure(self, frame: Frame) -> CompiledStructure:
        """Look up the structure of backwards like this one."""
        structure = self.whole_structure(frame)
        if structure.fixed_floats is None:
            return structure
        return self._history.structure((*self._structure_key(frame), self._skeleton.floats))

    def whole_structure(self, frame: Frame) -> CompiledStructure:
        """Look up the same, whatever floats the backward computes with."""
        return self._history.structure(self._structure_key(frame))

    def sizes(self, frame: Frame, key: StepKey) -> tuple[list[Shape], list[Number]]:
        """The shapes of the inputs that are computed with, and the numbers of the structure, in its order."""
        skeleton = self._skeleton
        return [frame.inputs[n].shape for n in skeleton.inputs], [slot.read(key.sizes) for slot in skeleton.slots]

    def remember(self, key: StepKey, use: Use | None) -> None:
        """Keep what runs for a key; what a guard lets through can be found again."""
        if len(self._uses) >= MOST_KEYS:
            self._uses = {k: u for k, u in self._uses.items() if u is None or u.variant.structure is None}
        self._uses[key] = use

    def refuse(self, key: StepKey, reason: str) -> None:
        """Run what has this key eagerly, and tell why."""
        self.remember(key, None)
        self._history.add_reason("runs eagerly", reason, self._nodes)

    def has_room(self, frame: Frame) -> bool:
        """Whether one more variant may be compiled; the first time that it may not, this is told.

        Variants with hooks of tensors that are gone can run no more.
        """
        if len(self._compiled) >= MOST_VARIANTS:
            for key in [key for key, tensors in self._reads.items() if any(tensor() is None for tensor in tensors)]:
                del self._reads[key]
                self._uses.pop(key, None)
                self._compiled.discard(key)
        whole = self.whole_structure(frame)
        is_new = whole.fixed_floats is not None and self._skeleton.floats not in whole.float_sets
        most = max(len(self._compiled), len(whole.float_sets) if is_new else 0)
        if most >= MOST_VARIANTS and not self._is_full:
            self._is_full = True
            reason = f"it was compiled for {MOST_VARIANTS} sets of shapes and numbers already"
            self._history.add("runs eagerly", self._nodes, (reason,))
        return not self._is_full

    def has_tried(self, structure: CompiledStructure, frame: Frame, key: StepKey) -> bool:
        """Whether what is known of the sizes was compiled already, and is not for these."""
        numbering, numbers = self.numbering(frame), self.sizes(frame, key)
        kind = kind_of(key, numbering)
        return any(
            v.samples == len(structure.samples)
            and v.kind == kind
            and (v.numbering == numbering or v.guard.read(*numbers) is None)
            for v in structure.variants
        )

    def _structure_key(self, frame: Frame) -> tuple[Hashable, ...]:
        return self._skeleton.signature, find_fixed(self._skeleton, frame.inputs)
