# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which hooks of a capture become part of its graph, and where the tensors that they read are found at each step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from retrograd.frontend.autograd.hook_identity import PLAIN, HookIdentity
from retrograd.frontend.autograd.hook_tape import HookTape, watch
from retrograd.frontend.autograd.python_calls import Frame, call_user_hook, find_source
from retrograd.frontend.hook_marks import is_inlineable

# Finds a tensor in the frame of a step, or elsewhere.
Finder = Callable[[Frame], torch.Tensor]


@dataclass(frozen=True)
class HookSite:
    """A call of a hook in a capture: which of this step's hooks it calls, and, to unpack, on which packed value."""

    hook: int
    packed: int | None


@dataclass(frozen=True)
class FromGraph:
    """A tensor that the graph computes: element ``index`` among the tensors that an FX node gives."""

    node: str
    index: int


@dataclass(frozen=True)
class InlinedCall:
    """A call of a hook that was watched; ``sources`` say where each of its tape's externals is found: in the graph, by
    the number of an input, or elsewhere."""

    tape: HookTape
    sources: tuple[FromGraph | int | Finder, ...]


def find_sites(graph: torch.fx.Graph) -> dict[str, HookSite]:
    """The calls of hooks in a capture by the name of the node."""
    sites = {}
    for node in graph.find_nodes(op="call_function", target=call_user_hook):
        place, hook = find_source(node.args[0])
        packed = [index for kind, index in map(find_source, node.args[1:]) if kind == "packed_data"]
        if place == "hooks":
            sites[node.name] = HookSite(hook, packed[0] if packed else None)
    return sites


def read_sites(sites: Sequence[HookSite], frame: Frame, identity: HookIdentity) -> Hashable:
    """The identities of those hooks of this step that are to be inlined, and what is packed for them."""
    parts: list[Hashable] = []
    for site in sites:
        if is_inlineable(hook := frame.hooks[site.hook]):
            packed = None if site.packed is None else packed_key(frame.packed[site.packed])
            parts.append((site.hook, identity.read(hook), packed))
    return tuple(parts)


def packed_key(value: Any) -> Hashable:
    """What a pack hook gave, but for the values of the tensors."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return (type(value), tuple([packed_key(part) for part in value]))
    if isinstance(value, dict):
        return tuple([(key, packed_key(part)) for key, part in value.items()])
    return (type(value), value) if isinstance(value, PLAIN) else None


def watch_hook(
    node: torch.fx.Node, values: dict[torch.fx.Node, Any], frame: Frame, call: Callable[[], Any], identity: HookIdentity
) -> tuple[Any, InlinedCall | str]:
    """Call a hook of a capture that runs on real tensors. Returns what it gives, and how to inline it, or why not.

    ``values`` are what the nodes before gave.
    """
    result, tape = watch(call)
    known = _known_tensors(node, values, frame)
    known |= {key: _remembered(tensor) for key, tensor in identity.tensors.items() if key not in known}
    sources: list[FromGraph | int | Finder] = []
    for number in tape.externals:
        source = known.get(id(tape.tensors[number]))
        if source is None:
            shape = list(tape.tensors[number].shape)
            return result, f"it reads a tensor of shape {shape} that is not found in its closure, globals or attributes"
        sources.append(source)
    if tape.problem is not None:
        return result, tape.problem
    if tape.before:
        return result, "it writes to a tensor"
    if tape.kept:
        return result, "it keeps a tensor that it made"
    return result, InlinedCall(tape, tuple(sources))


def describe_hook(hook: Any) -> str:
    """A hook as its author knows it: name, file and line."""
    inner = getattr(hook, "func", hook)
    inner = getattr(inner, "__func__", inner)
    name = getattr(inner, "__qualname__", type(hook).__name__)
    code = getattr(inner, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _known_tensors(
    node: torch.fx.Node, values: dict[torch.fx.Node, Any], frame: Frame
) -> dict[int, FromGraph | int | Finder]:
    """The tensors that a call is given, by id."""
    known: dict[int, FromGraph | int | Finder] = {id(tensor): number for number, tensor in enumerate(frame.inputs)}
    for argument in node.all_input_nodes:
        place, index = find_source(argument)
        if place == "packed_data":
            leaves = pytree.tree_leaves(frame.packed[index])
            known |= {id(t): _packed_leaf(index, n) for n, t in enumerate(leaves) if isinstance(t, torch.Tensor)}
        elif place is None:
            tensors = [t for t in pytree.tree_leaves(values[argument]) if isinstance(t, torch.Tensor)]
            known |= {id(tensor): FromGraph(argument.name, n) for n, tensor in enumerate(tensors)}
    return known


def _packed_leaf(index: int, leaf: int) -> Finder:
    def find(frame: Frame) -> torch.Tensor:
        value = frame.packed[index]
        found: torch.Tensor = value if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)[leaf]
        return found

    return find


def _remembered(tensor: torch.Tensor) -> Finder:
    """A tensor of the hook's own. The hook's identity says that it is still there."""
    reference = weakref.ref(tensor)

    def find(frame: Frame) -> torch.Tensor:
        found = reference()
        assert found is not None
        return found

    return find
