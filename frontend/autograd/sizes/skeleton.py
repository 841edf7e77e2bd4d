# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A captured backward without its sizes: what two captures of one structure have in common, and where they differ.

PyTorch captures a backward anew when a number in it changes, or when gradients are there already. Two captures are of
one structure where they call the same functions on the same values; integers and floats among the arguments are its
numbers, compared place by place (``structure.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch._dynamo.compiled_autograd import Op

from retrograd.frontend.autograd.engine.python_calls import accumulate_into, find_source
from retrograd.frontend.autograd.hooks.hook_identity import Same
from retrograd.frontend.autograd.steps.recorder import is_cpp_function, opaque_kind

Path = tuple[Any, ...]
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
    signature = tuple([reader.describe(node) for node in graph.nodes if not is_source(node)])
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
    """List the results of an opaque call."""
    return list(given) if isinstance(given, (list, tuple)) else [given]


def is_source(node: torch.fx.Node) -> bool:
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
        """Name what a node calls; what is not known by its name is held as well."""
        if is_cpp_function(node):
            # PyTorch names each capture of it anew.
            return "cpp_function"
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
