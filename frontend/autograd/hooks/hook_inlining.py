# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which hooks of a capture become part of its graph, and where the tensors that they read are found at each step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from retrograd.frontend.autograd.engine.hook_calls import call_user_hook
from retrograd.frontend.autograd.engine.python_calls import Frame, accumulate_into, find_source
from retrograd.frontend.autograd.hooks.hook_identity import PLAIN, HookIdentity, reads_rate
from retrograd.frontend.autograd.hooks.hook_tape import HookTape, watch
from retrograd.frontend.autograd.hooks.packed_values import PackedLeaf
from retrograd.frontend.hooks.hook_marks import is_inlineable

Call = Callable[[], Any]
POST_ACCUMULATE = "post_acc_grad_hook"
# Why a hook is not inlined yet.
SETTING_UP = "it keeps a tensor that it made"

# Finds a tensor in the frame of a step, or elsewhere.
Finder = Callable[[Frame], torch.Tensor]


@dataclass(frozen=True)
class HookSite:
    """A call of a hook in a capture: which of this step's hooks it calls; to unpack, on which packed value; after an
    accumulation, on which input."""

    hook: int
    packed: int | None
    param: int | None


@dataclass(frozen=True)
class FromGraph:
    """A tensor that the graph computes: element ``index`` among the tensors that an FX node gives."""

    node: str
    index: int


@dataclass(frozen=True)
class Gradient:
    """The gradient that was just accumulated, of the parameter that a hook is called on."""


Source = FromGraph | Gradient | int | Finder


@dataclass(frozen=True)
class InlinedCall:
    """A call of a hook that was watched; ``sources`` say where each of its tape's externals is found: in the graph, by
    the number of an input, or elsewhere.

    Of a post-accumulate hook ``param`` is the input, and the tape's result its gradient as the hook leaves it: none
    where it frees it. ``updates`` are the externals that it writes to, but for the gradient, by number.
    """

    tape: HookTape
    sources: tuple[Source, ...]
    param: int | None = None
    updates: tuple[int, ...] = ()


def find_sites(graph: torch.fx.Graph) -> dict[str, HookSite]:
    """The calls of hooks in a capture by the name of the node."""
    sites = {}
    for node in graph.find_nodes(op="call_function", target=call_user_hook):
        place, hook = find_source(node.args[0])
        packed = [index for kind, index in map(find_source, node.args[1:]) if kind == "packed_data"]
        if place == "hooks":
            param = find_source(node.args[1])[1] if node.kwargs["hook_type"] == POST_ACCUMULATE else None
            sites[node.name] = HookSite(hook, packed[0] if packed else None, param)
    return sites


def find_accumulations(module: torch.fx.GraphModule) -> dict[str, list[str]]:
    """Each accumulation that post-accumulate hooks follow, with these, by the names of the nodes."""
    found: dict[str, list[str]] = {}
    last: dict[int, str] = {}
    for node in module.graph.nodes:
        if node.target is accumulate_into:
            last[find_source(node.args[0])[1]] = node.name
        elif node.target is call_user_hook and node.kwargs["hook_type"] == POST_ACCUMULATE:
            found.setdefault(last[find_source(node.args[1])[1]], []).append(node.name)
    return found


class SiteKey(NamedTuple):
    """Identifies the hooks that are inlined at one step. Has of each, by number: its identity, what is packed for it
    (None where it unpacks nothing), and whether its parameter has no gradient yet. If any may write to tensors,
    ``shared`` says which inputs share memory."""

    hooks: tuple[tuple[int, Hashable, Hashable, bool], ...] = ()
    shared: tuple[int, ...] = ()

    def without_sizes(self, used: Sequence[int]) -> Hashable:
        """The same of a step of any sizes, and of any capture that has the inputs of these numbers in this order."""
        first: dict[int, int] = {}
        shared = [first.setdefault(self.shared[number], place) for place, number in enumerate(used) if self.shared]
        return tuple([(same, fresh) for _, same, packed, fresh in self.hooks if packed is None]), tuple(shared)


NO_SITES = SiteKey()


def read_sites(sites: Sequence[HookSite], frame: Frame, identity: HookIdentity) -> SiteKey:
    """The hooks of this step that are to be inlined."""
    parts: list[tuple[int, Hashable, Hashable, bool]] = []
    writes = False
    for site in sites:
        if is_inlineable(hook := frame.hooks[site.hook]):
            packed = None if site.packed is None else (packed_key(frame.packed[site.packed]),)
            fresh = site.param is None or frame.inputs[site.param].grad is None
            parts.append((site.hook, identity.read(hook), packed, fresh))
            writes = writes or site.param is not None
    return SiteKey(tuple(parts), _shared_memory(frame.inputs) if writes else ())


def _shared_memory(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    first: dict[int, int] = {}
    return tuple([first.setdefault(t.untyped_storage().data_ptr(), n) for n, t in enumerate(tensors)])


def packed_key(value: Any) -> Hashable:
    """Describe a pack hook's result by everything but the values of its tensors."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return (type(value), tuple([packed_key(part) for part in value]))
    if isinstance(value, dict):
        return tuple([(key, packed_key(part)) for key, part in value.items()])
    return (type(value), value) if isinstance(value, PLAIN) else None


def watch_hook(
    node: torch.fx.Node, values: Mapping[torch.fx.Node, Any], frame: Frame, call: Call, identity: HookIdentity
) -> tuple[Any, InlinedCall | str]:
    """Call a hook of a capture that runs on real tensors. Returns what it gives, and how to inline it, or why not.
    ``values`` are what the nodes before gave."""
    post = node.kwargs["hook_type"] == POST_ACCUMULATE
    param: int | None = find_source(node.args[1])[1] if post else None
    gradient = None if param is None else frame.inputs[param].grad
    known: dict[int, Source] = {id(gradient): Gradient()} if gradient is not None else {}
    known = _known_tensors(node, values, frame) | known
    with as_compiled(identity.optimizers) as rates:
        result, tape = watch(call if param is None else lambda: (call(), frame.inputs[param].grad)[1])
    known = {key: _remembered(tensor) for key, tensor in identity.tensors.items()} | rates | known
    result = frame.inputs[param] if param is not None else result
    for number in tape.externals:
        if id(tape.tensors[number]) not in known:
            shape = list(tape.tensors[number].shape)
            return result, f"it reads a tensor of shape {shape} that is not found in its closure, globals or attributes"
    if (problem := tape.problem or identity.obstacles.get(id(values[_hook_of(node)]))) is not None:
        return result, problem
    others = _memory_of_gradients(frame.inputs, gradient)
    if any(tape.tensors[number].untyped_storage().data_ptr() in others for number in tape.externals):
        return result, "it reads the gradient of another parameter, which this backward may add to before or after it"
    sources = tuple(known[id(tape.tensors[number])] for number in tape.externals)
    written = (n for n, s in zip(tape.externals, sources, strict=True) if n in tape.before and s != Gradient())
    # What is worked out from another's new value comes after it, which may then be written already.
    updates = tuple(sorted(written, key=tape.last_writes.__getitem__))
    if param is None and tape.before:
        return result, "it writes to a tensor"
    return result, SETTING_UP if tape.kept else InlinedCall(tape, sources, param, updates)


def _hook_of(node: torch.fx.Node) -> torch.fx.Node:
    hook = node.args[0]
    assert isinstance(hook, torch.fx.Node)
    return hook


def _memory_of_gradients(inputs: Sequence[torch.Tensor], own: torch.Tensor | None) -> set[int]:
    """Where the gradients of the leaves among the inputs lie, less the one that a hook is called for."""
    given = [tensor.grad for tensor in inputs if tensor.is_leaf and tensor.requires_grad]
    return {g.untyped_storage().data_ptr() for g in given if g is not None and g is not own and not g.is_sparse}


@contextmanager
def as_compiled(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[dict[int, Source]]:
    """Have optimizers keep their count of steps and their learning rates in tensors, as under ``torch.compile``, and
    not look at the numbers: a schedule changes the rate at each step. Gives the sources of the rates, by id."""
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
    rates: dict[int, Source] = {}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            others: dict[str, Any] = {"capturable": True} if group.get("capturable") is False else {}
            if reads_rate(optimizer, group):
                rate = _rate(group)
                rates[id(rate)] = _current_rate(optimizer, number)
                others |= {"lr": rate, "foreach": True}
            changed.append((group, {name: group[name] for name in others}))
            group.update(others)
    compiling, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, bool(changed)
    try:
        yield rates
    finally:
        torch.compiler._is_compiling_flag = compiling
        for group, before in changed:
            group.update(before)


def _rate(group: Mapping[str, Any]) -> torch.Tensor:
    # As precise as Python's number.
    return torch.tensor(group["lr"], dtype=torch.float64, device="cpu")


def _current_rate(optimizer: torch.optim.Optimizer, number: int) -> Finder:
    reference = weakref.ref(optimizer)

    def find(frame: Frame) -> torch.Tensor:
        found = reference()
        assert found is not None, "the hook's identity says that its optimizer is still there"
        return _rate(found.param_groups[number])

    return find


def _known_tensors(node: torch.fx.Node, values: Mapping[torch.fx.Node, Any], frame: Frame) -> dict[int, Source]:
    """The tensors that a call is given, by id."""
    known: dict[int, Source] = {id(tensor): number for number, tensor in enumerate(frame.inputs)}
    for argument in node.all_input_nodes:
        place, index = find_source(argument)
        if place == "packed_data":
            leaves = pytree.tree_leaves(frame.packed[index])
            known |= {id(t): PackedLeaf(index, n) for n, t in enumerate(leaves) if isinstance(t, torch.Tensor)}
        elif place is None:
            tensors = [t for t in pytree.tree_leaves(values[argument]) if isinstance(t, torch.Tensor)]
            known |= {id(tensor): FromGraph(argument.name, n) for n, tensor in enumerate(tensors)}
    return known


def _remembered(tensor: torch.Tensor) -> Finder:
    """A tensor of the hook's own. The hook's identity says that it is still there."""
    reference = weakref.ref(tensor)

    def find(frame: Frame) -> torch.Tensor:
        found = reference()
        assert found is not None
        return found

    return find
