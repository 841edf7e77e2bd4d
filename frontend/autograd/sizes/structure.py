# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compares captures of one backward at different sizes: finds which sizes differ from step to step.

Captures of one structure have the same skeleton (``skeleton.py``). The shapes of the inputs, the numbers, and the
shapes of what opaque calls gave are a sample; what differs between samples is open.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from retrograd.frontend.autograd.sizes.skeleton import Number, Skeleton, leaves_of

# Of more sizes that contradict what was taken for granted, nothing is learned any more.
MOST_SAMPLES = 4

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """The sizes of one step, of a structure's inputs, slots, and opaque calls (None: no tensor)."""

    shapes: tuple[Shape, ...]
    numbers: tuple[Number, ...]
    results: tuple[tuple[Shape | None, ...], ...]

    def places(self) -> tuple[Number, ...]:
        """All the numbers, in order."""
        results = [n for shapes in self.results for shape in shapes if shape is not None for n in shape]
        return (*[n for shape in self.shapes for n in shape], *self.numbers, *results)

    def rank(self) -> tuple[Hashable, ...]:
        """Return the numbers of axes, which have to agree for samples to be compared."""
        ranks = tuple([tuple([None if s is None else len(s) for s in shapes]) for shapes in self.results])
        return tuple([len(s) for s in self.shapes]), len(self.numbers), ranks


def find_fixed(skeleton: Skeleton, inputs: Sequence[torch.Tensor]) -> Hashable:
    """Find the facts that are never open: dtypes, numbers of axes, and the shapes of parameters. Models that differ in
    these are two structures."""
    used = [inputs[number] for number in skeleton.inputs]
    return tuple([(t.dtype, tuple(t.shape) if isinstance(t, torch.nn.Parameter) else t.dim()) for t in used])


def take_sample(
    skeleton: Skeleton, inputs: Sequence[torch.Tensor], sizes: Sequence[int], recorded: Mapping[str, Any]
) -> Sample:
    """The sizes of a step whose opaque calls gave ``recorded``."""
    results = [leaves_of(recorded[call]) for call in skeleton.calls]
    return Sample(
        tuple([tuple(inputs[number].shape) for number in skeleton.inputs]),
        tuple([slot.read(sizes) for slot in skeleton.slots]),
        tuple([tuple([tuple(t.shape) if isinstance(t, torch.Tensor) else None for t in given]) for given in results]),
    )


def translate_sample(earlier: Sample, known: Skeleton, skeleton: Skeleton, now: Sample) -> Sample | None:
    """Translate a step of another structure into a sample of this one, where they differ only in where their numbers
    come from: Dynamo captures a forward that meets a second size again, and its backward then takes sizes that were
    constants.

    ``known`` and ``skeleton`` are those of the structures; None where the steps are of the same shapes, or do not
    compare.
    """
    if earlier.shapes == now.shapes or earlier.rank()[::2] != now.rank()[::2]:
        return None
    pairs = [(a, b) for old, new in zip(earlier.shapes, now.shapes, strict=True) for a, b in zip(old, new, strict=True)]
    was: dict[Number, Number] = {new: old for old, new in pairs if new != old}
    constants = {(s.node, s.path): n for s, n in zip(known.slots, earlier.numbers, strict=True)}
    numbers = tuple(
        [constants.get((s.node, s.path), was.get(n, n)) for s, n in zip(skeleton.slots, now.numbers, strict=True)]
    )
    return Sample(earlier.shapes, numbers, earlier.results)


@dataclass
class Structure:
    """The sizes of one structure's steps so far. ``refusal`` is why its sizes are compiled in, each set by itself;
    ``fixed_floats`` why its floats are: each set of them is then a structure by itself. ``float_sets`` are those that
    were recorded. The first sample ``is_borrowed`` where it is another structure's: see :func:`translate_sample`."""

    samples: list[Sample] = field(default_factory=list)
    refusal: str | None = None
    fixed_floats: str | None = None
    float_sets: set[tuple[float, ...]] = field(default_factory=set)
    is_borrowed: bool = False

    def learn(self, sample: Sample) -> None:
        """Take a sample into account, if it differs from what was known to differ, or is the first to trace with."""
        if self.samples and sample.rank() != self.samples[0].rank():
            self.refusal = "what a hook or function gives has another number of axes"
        elif len(self.samples) < MOST_SAMPLES and not (self.covers(sample) and self._has_example_without(sample)):
            self.samples.append(sample)

    def _has_example_without(self, sample: Sample) -> bool:
        """Whether a sample is not needed to trace with."""
        return self.example() is not None or replace(self, samples=[*self.samples, sample]).example() is None

    @property
    def notes(self) -> tuple[str, ...]:
        """Why something is not left open."""
        what = {"number": self.fixed_floats, "size": self.refusal}
        return tuple([f"no {kind} is left open: {reason}" for kind, reason in what.items() if reason is not None])

    def refuse(self, reason: str) -> None:
        """Leave floats open no longer, or, where they are not, anything; but where that was guessed from another
        structure, wait for a second set of sizes."""
        if self.is_borrowed:
            del self.samples[0]
            self.is_borrowed = False
        elif self.has_open_floats:
            self.fixed_floats = reason
        else:
            self.refusal = reason

    def covers(self, sample: Sample) -> bool:
        """Whether sizes that were equal in all samples are so in this one, and those that never changed have not."""
        known = self._columns()
        first: dict[Hashable, Number] = {}
        return bool(self.samples) and all(
            (now == vector[0]) if _is_fixed(vector) else first.setdefault((type(now), vector), now) == now
            for vector, now in zip(known, sample.places(), strict=True)
        )

    @property
    def is_open(self) -> bool:
        """Whether anything differs from step to step, and may be left open: not as long as nothing was met but 0 and
        1, of which a trace would take more for granted."""
        may_be = self.refusal is None and self.fixed_floats is None and len(self.samples) > 1
        return may_be and self.example() is not None

    @property
    def has_open_floats(self) -> bool:
        """Whether a float differs from step to step."""
        return any(isinstance(column[0], float) and not _is_fixed(column) for column in self._columns())

    def _columns(self) -> list[tuple[Number, ...]]:
        return list(zip(*[s.places() for s in self.samples], strict=True))

    def example(self) -> Sample | None:
        """Choose a sample to trace with: one of which no open size is 1 or 0."""
        vectors = self._columns()
        for sample in reversed(self.samples):
            if all(
                _is_fixed(vector) or isinstance(n, float) or n > 1
                for vector, n in zip(vectors, sample.places(), strict=True)
            ):
                return sample
        return None

    def vectors(self, choose: Callable[[Sample], Any]) -> Any:
        """``choose`` of each sample, in nested tuples of the same form, joined place by place: a number where all
        samples have it, else the tuple of theirs."""
        return _join([choose(sample) for sample in self.samples])


def _is_fixed(vector: Sequence[Number]) -> bool:
    return all(n == vector[0] for n in vector)


def _join(parts: Sequence[Any]) -> Any:
    if parts[0] is None:
        return None
    if isinstance(parts[0], (int, float)):
        return parts[0] if _is_fixed(parts) else Vector(type(parts[0]), tuple(parts))
    return tuple([_join(column) for column in zip(*parts, strict=True)])


@dataclass(frozen=True)
class Vector:
    """A size, or another number, that differs: its type, and what it is in each sample."""

    kind: type
    values: tuple[Number, ...]
