# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What captures of one backward have in common, whatever its sizes: which of them differ from step to step.

PyTorch captures a backward anew when a number in it changes, or when gradients are there already. Two captures are of
one structure where they call the same functions on the same values; integers and floats among the arguments are its
numbers, compared place by place. The shapes of the inputs, the numbers, and the shapes of what opaque calls gave are a
sample; what differs between samples is open.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.compiled_autograd import Op

from retrograd.frontend.autograd.hook_identity import Same
from retrograd.frontend.autograd.python_calls import accumulate_into, find_source
from retrograd.frontend.autograd.recorder import opaque_kind

if TYPE_CHECKING:
    from retrograd.frontend.autograd.variants import Variant

# Of more sizes that contradict what was taken for granted, nothing is learned any more.
MOST_SAMPLES = 4

Path = tuple[Any, ...]
Shape = tuple[int, ...]
Number = int | float


@dataclass(frozen=True)
class Slot:
    """A number among the arguments of a node: where it stands, and what it is, a constant or a number of ``sizes``."""

    node: str
    path: Path
    constant: Number | None
    size: int | None

    def read(self, sizes: Sequence[int]) -> Number:
        """The number, at one step."""
        if self.size is not None:
            return sizes[self.size]
        assert self.constant is not None
        return self.constant


@dataclass(frozen=True)
class Skeleton:
    """A capture without its sizes: ``signature`` is equal for captures of one structure, whose ``inputs`` (numbers of
    those that are computed with, in the order of their first use), ``slots`` and ``calls`` (the nodes of opaque calls)
    then stand for each other. ``held`` are the functions and constants that it has of its own: two captures with the
    same ones compute the same."""

    signature: Hashable
    inputs: tuple[int, ...]
    slots: tuple[Slot, ...]
    calls: tuple[str, ...]
    held: Hashable = ()

    @property
    def floats(self) -> tuple[float, ...]:
        """The floats among the numbers."""
        return tuple([slot.constant for slot in self.slots if isinstance(slot.constant, float)])


def read_skeleton(graph: torch.fx.Graph) -> Skeleton:
    """The skeleton of a capture that was made runnable."""
    reader = _Reader()
    signature = tuple([reader.describe(node) for node in graph.nodes if not _is_source(node)])
    return Skeleton(signature, tuple(reader.inputs), tuple(reader.slots), tuple(reader.calls), tuple(reader.held))


def put(arguments: Any, path: Path, value: Any) -> Any:
    """``arguments``, a pair of (args, kwargs), with ``value`` at a slot's place."""
    if not path:
        return value
    head, *rest = path
    if isinstance(arguments, dict):
        return {**arguments, head: put(arguments[head], tuple(rest), value)}
    items = [put(a, tuple(rest), value) if i == head else a for i, a in enumerate(arguments)]
    return items if isinstance(arguments, list) else tuple(items)


def leaves_of(given: Any) -> list[Any]:
    """What an opaque call gave, one after the other."""
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _is_source(node: torch.fx.Node) -> bool:
    """Whether a node only names an argument of the backward."""
    return node.op == "placeholder" or find_source(node)[0] is not None or _size_number(node) is not None


def _is_open(node: torch.fx.Node, value: Any) -> bool:
    """Whether a constant is a number that may differ: not which part of a result is taken, nor what is no number."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and isfinite(value) and node.target is not operator.getitem


def _size_number(node: torch.fx.Node) -> int | None:
    """Which number of ``sizes`` a node is."""
    while node.op == "call_function" and node.args:
        source, *index = node.args
        if not isinstance(source, torch.fx.Node):
            return None
        if source.op == "placeholder":
            return int(str(index[0])) if source.target == "sizes" and index else None
        if getattr(node.target, "__name__", "") != "unwrap_maybe_dynamic_int":
            return None
        node = source
    return None


class _Reader:
    """Reads nodes in order; knows values by when they were met first."""

    def __init__(self) -> None:
        self.inputs: dict[int, int] = {}
        self.slots: list[Slot] = []
        self.calls: list[str] = []
        self.held: list[Same] = []
        self._nodes: dict[torch.fx.Node, int] = {}

    def describe(self, node: torch.fx.Node) -> Hashable:
        self._nodes[node] = len(self._nodes)
        if opaque_kind(node) is not None:
            self.calls.append(node.name)
        args = list(node.args)
        if node.target is accumulate_into:
            # What the gradient was at capture is not looked at.
            args[1] = None
        leaves = tuple(self._leaves(node, args, (0,))) + tuple(self._leaves(node, node.kwargs, (1,)))
        return (node.op, self._target(node), leaves)

    def _target(self, node: torch.fx.Node) -> str:
        """What a node calls, by name; what is not known by its name is held as well."""
        if not isinstance(node.target, str):
            if not isinstance(node.target, (Op, torch._ops.OpOverload)):
                self.held.append(Same(node.target))
            return getattr(node.target, "__name__", repr(node.target))
        if node.op in ("get_attr", "call_module"):
            owner: Any = node.graph.owning_module
            self.held.append(Same(operator.attrgetter(node.target)(owner)))
        return node.target

    def _leaves(self, node: torch.fx.Node, value: Any, path: Path) -> Iterator[Hashable]:
        if isinstance(value, (list, tuple)):
            yield (type(value).__name__, len(value))
            for index, part in enumerate(value):
                yield from self._leaves(node, part, (*path, index))
        elif isinstance(value, dict):
            for key, part in value.items():
                yield key
                yield from self._leaves(node, part, (*path, key))
        elif isinstance(value, torch.fx.Node):
            yield self._source(node, value, path)
        elif _is_open(node, value):
            self.slots.append(Slot(node.name, path, value, None))
            yield type(value).__name__
        else:
            yield repr(value)

    def _source(self, node: torch.fx.Node, value: torch.fx.Node, path: Path) -> Hashable:
        number = _size_number(value)
        if number is not None:
            self.slots.append(Slot(node.name, path, None, number))
            return int.__name__
        place, index = find_source(value)
        if place == "inputs":
            return (place, self.inputs.setdefault(index, len(self.inputs)))
        return ("value", self._nodes[value]) if place is None else (place, index)


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
        """What has to agree for samples to be compared."""
        ranks = tuple([tuple([None if s is None else len(s) for s in shapes]) for shapes in self.results])
        return tuple([len(s) for s in self.shapes]), len(self.numbers), ranks


def find_fixed(skeleton: Skeleton, inputs: Sequence[torch.Tensor]) -> Hashable:
    """What is never open: dtypes, numbers of axes, and the shapes of parameters. Models that differ in these are two
    structures."""
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
    """What a step of another structure, the same but for where its numbers come from, would have been as one of this:
    Dynamo captures a forward that meets a second size again, and its backward then takes sizes that were constants.

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
    """What is known of a structure. ``refusal`` is why its sizes are compiled in, each set by itself; ``fixed_floats``
    why its floats are: each set of them is then a structure by itself. ``float_sets`` are those that were recorded,
    ``variants`` what was compiled with open sizes, of any capture. The first sample ``is_borrowed`` where it is one of
    another structure: see :func:`translate_sample`."""

    samples: list[Sample] = field(default_factory=list)
    refusal: str | None = None
    fixed_floats: str | None = None
    float_sets: set[tuple[float, ...]] = field(default_factory=set)
    is_borrowed: bool = False
    variants: list[Variant] = field(default_factory=list)

    def learn(self, sample: Sample) -> None:
        """Take a sample into account, if it differs from what was known to differ."""
        if self.samples and sample.rank() != self.samples[0].rank():
            self.refusal = "what a hook or function gives has another number of axes"
        elif len(self.samples) < MOST_SAMPLES and not self.covers(sample):
            self.samples.append(sample)

    @property
    def notes(self) -> tuple[str, ...]:
        """Why something is not left open."""
        what = {"number": self.fixed_floats, "size": self.refusal}
        return tuple([f"no {kind} is left open: {reason}" for kind, reason in what.items() if reason is not None])

    def refuse(self, reason: str) -> None:
        """Leave floats open no longer, or, where they are not, anything; but where that was guessed from another
        structure, wait for a second set of sizes."""
        self.variants.clear()
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
        """Whether anything differs from step to step, and may be left open."""
        return self.refusal is None and self.fixed_floats is None and len(self.samples) > 1

    @property
    def has_open_floats(self) -> bool:
        """Whether a float differs from step to step."""
        return any(isinstance(column[0], float) and not _is_fixed(column) for column in self._columns())

    def _columns(self) -> list[tuple[Number, ...]]:
        return list(zip(*[s.places() for s in self.samples], strict=True))

    def example(self) -> Sample | None:
        """What to trace with: a sample of which no open size is 1 or 0."""
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
