# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which gradients are None at a step, where a hook or a custom function gave None for one that it gave when the
backward was compiled. What is compiled computes with zeros; Python is to see None, as in eager."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from retrograd.frontend.autograd.engine.custom_functions import finish_slices, prepare_slices, sum_gradients

# Of a node of a capture that gives several values: of which one, and so on.
Place = tuple[int, ...]


class AbsentGradients:
    """Asks of the values of a capture whether they are there at a step.

    ``recorded`` says which values each node gave when the capture was recorded, by the node's name; ``given`` which the
    calls of Python gave at this step, those that have run since a gradient was None. A value that was there is there
    now if any gradient that it is computed from is.
    """

    def __init__(self, graph: torch.fx.Graph, recorded: Mapping[str, Any]) -> None:
        self._nodes = {node.name: node for node in graph.nodes}
        self._recorded = recorded
        self._given: dict[str, Any] = {}
        self._known: dict[tuple[str, Place], bool] = {}

    def note(self, name: str, present: tuple[bool, ...] | bool) -> None:
        """Take note of what the call ``name`` gave at this step."""
        self._given[name] = present

    def lost(self) -> list[str]:
        """The calls that gave None for what they gave when the capture was recorded."""
        return [name for name, present in self._given.items() if present != self._recorded.get(name, present)]

    def is_there(self, name: str, place: Place = ()) -> bool:
        """Whether a value of the node ``name`` is there."""
        # No recursion: a backward may have thousands of nodes behind one another.
        pending = [(name, place)]
        while pending:
            asked = pending[-1]
            if asked in self._known:
                pending.pop()
                continue
            sources = self._sources(*asked)
            if isinstance(sources, bool):
                self._known[asked] = sources
            elif (open_sources := [source for source in sources if source not in self._known]) and not any(
                self._known.get(source) for source in sources
            ):
                pending.append(open_sources[0])
            else:
                self._known[asked] = any(self._known.get(source) for source in sources)
        return self._known[name, place]

    def _sources(self, name: str, place: Place) -> bool | list[tuple[str, Place]]:
        """Whether a value is there, or the values of which one has to be."""
        if name in self._given:
            return _look_up(self._given[name], place)
        node = self._nodes[name]
        if node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
            return [(node.args[0].name, (int(str(node.args[1])), *place))]
        if not _look_up(self._recorded.get(name, True), place):
            return False
        if node.target is sum_gradients:
            return _values_of(node.args)
        if node.target is prepare_slices:
            return _values_of(node.args[0])
        if node.target is finish_slices:
            _, result, given, _ = node.args
            return _values_of(given[place[0]] if place and isinstance(given, (list, tuple)) else result)
        if not node.args or not isinstance(node.args[0], (list, tuple)):
            return True
        if getattr(node.target, "__name__", "") == "validate_outputs":
            return _values_of(node.args[0][place[0]] if place else node.args[0])
        # A node of autograd, whose first argument are its gradients; it gives none where it gets none.
        return _values_of(node.args[0]) or True


def describe_presence(value: Any) -> Any:
    """Describes to :class:`AbsentGradients` what a node gave: of each value whether it is there."""
    if isinstance(value, (list, tuple)):
        return tuple([describe_presence(part) for part in value])
    return value is not None


def _look_up(present: Any, place: Place) -> bool:
    for index in place:
        if isinstance(present, bool):
            break
        present = present[index]
    return any(present) if isinstance(present, tuple) else bool(present)


def _values_of(arguments: Any) -> list[tuple[str, Place]]:
    leaves = torch.utils._pytree.tree_leaves(arguments)
    return [(leaf.name, ()) for leaf in leaves if isinstance(leaf, torch.fx.Node)]
