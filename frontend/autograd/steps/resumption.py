# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ends a step in eager where a custom function, or a hook on a node, gave gradients that the compiled backward has no
place for.

What has run is not run again: the capture, whose nodes are in eager's order, goes on behind the function. For that, it
is given the gradients that are on their way past it, and the inputs of what comes after it are kept until it was
called, as eager keeps them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from retrograd.frontend.autograd.engine.custom_functions import call_custom_backward, finish_slices, prepare_slices
from retrograd.frontend.autograd.engine.hook_calls import call_user_hook
from retrograd.frontend.autograd.engine.python_calls import Unforeseen, accumulate_into, find_source
from retrograd.frontend.autograd.sizes.skeleton import is_source, leaves_of
from retrograd.frontend.autograd.steps.recorder import Recorder

# Steps that are recorded to find all gradients that a custom function gives at one step or another.
MOST_STEPS = 8


class GivenGradients:
    """Which gradients the custom functions and hooks of a capture give, at one step or another.

    What is compiled is to have a place for each of them: a step at which one is None is recorded again, a few times.
    """

    def __init__(self) -> None:
        self._places: dict[str, set[int]] = {}
        self._steps = 0
        # The calls, by node, for whose gradients zeros cannot stand where they are None.
        self.unsafe: frozenset[str] = frozenset()

    def learn(self, call: str, unforeseen: Unforeseen) -> bool:
        """Take note of what the node ``call`` gave that there was no place for; says whether what is compiled lacks a
        place for it. It does not where zeros cannot stand for None, and all else was as before."""
        if call in self.unsafe and not any(unforeseen.given[n] is not None for n in unforeseen.lacking()):
            return False
        given = {n for n in unforeseen.call.firm if unforeseen.given[n] is not None}
        self._places.setdefault(call, set()).update(given)
        return True

    def find_lacking(self, results: Mapping[str, Any]) -> str | None:
        """Find a call that, in a recorded step, gave None for a gradient that it gave at another."""
        return next((call for call, places in self._places.items() if _lacks(results[call], places)), None)

    def wait(self) -> bool:
        """Whether to wait for a step that gives all of them, once more."""
        self._steps += 1
        return self._steps <= MOST_STEPS


def _lacks(results: Sequence[Any], places: Iterable[int]) -> bool:
    return any(results[place] is None for place in places)


def has_firm_calls(recorder: Recorder) -> bool:
    """Whether a step of a capture, by what its calls gave when it was recorded, may have to end in eager."""
    calls = [n for n in recorder.capture.graph.nodes if n.target in (call_custom_backward, call_user_hook)]
    return any(find_firm_places(node, leaves_of(recorder.results[node.name]), recorder) for node in calls)


def find_firm_places(node: torch.fx.Node, results: Sequence[Any], recorder: Recorder) -> tuple[int, ...]:
    """Find the results of custom functions and hooks that a compiled backward takes for granted to be there, or not to
    be, as they were recorded: of gradients that were None, those that lead on; all, where the function wrote to a view,
    whose base has no gradient if what was written to it has none. A hook gives None for None. Where zeros cannot stand
    for None, all that lead on are."""
    present, is_unsafe = recorder.present, node.name in recorder.unsafe
    if node.target is call_user_hook:
        gradients = node.args[1]
        if node.kwargs["hook_type"] not in ("pre_hook", "post_hook") or not isinstance(gradients, (list, tuple)):
            return ()
        given = [isinstance(g, torch.fx.Node) and bool(present.get(g.name, True)) for g in gradients]
        return tuple([n for n, g in enumerate(given) if g and (is_unsafe or results[n] is None) and _leads_on(node, n)])
    if any(user.target is finish_slices for part in node.users for user in part.users):
        return tuple(range(len(results)))
    return tuple([n for n, result in enumerate(results) if (is_unsafe or result is None) and _leads_on(node, n)])


def _leads_on(node: torch.fx.Node, number: int) -> bool:
    """Whether a result of a node is the gradient of something that needs one."""
    parts = [user for user in node.users if user.target is operator.getitem and user.args[1] == number]
    return any(_is_wanted(user, part) for part in parts for user in part.users)


def _is_wanted(user: torch.fx.Node, part: torch.fx.Node) -> bool:
    if getattr(user.target, "__name__", "") != "validate_outputs":
        return True
    gradients, forms = user.args
    assert isinstance(gradients, (list, tuple)) and isinstance(forms, (list, tuple))
    return any(g is part and form is not None for g, form in zip(gradients, forms, strict=True))


def find_rest(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes before one of a capture whose values are used after it."""
    later = [*_begun_slices(node), *_nodes_after(node)]
    seen = {a for user in later for a in user.all_input_nodes} - {*later, node}
    return [other for other in node.graph.nodes if other in seen and not is_source(other)]


def _begun_slices(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Lists what begins the backward of a write to a view that a node is part of. It is run once more: of two values
    that share memory, two are handed on that do not."""
    ends = [user for part in node.users for user in part.users if user.target is finish_slices]
    parts = {part for end in ends for part in end.all_input_nodes if part.target is operator.getitem}
    begins = {part.args[0] for part in parts if getattr(part.args[0], "target", None) is prepare_slices}
    return [other for other in node.graph.nodes if other in begins or (other in parts and other.args[0] in begins)]


def find_inputs(node: torch.fx.Node) -> frozenset[int]:
    """The numbers of the inputs of a capture that are used after one of its nodes."""
    found = set()
    for user in [*_begun_slices(node), *_nodes_after(node)]:
        # What the gradient was at capture is of no interest.
        used = [user.args[0], user.args[2]] if user.target is accumulate_into else user.all_input_nodes
        found |= {number for place, number in map(find_source, used) if place == "inputs"}
    return frozenset(found)


def _nodes_after(node: torch.fx.Node) -> list[torch.fx.Node]:
    nodes = list(node.graph.nodes)
    return [other for other in nodes[nodes.index(node) + 1 :] if not is_source(other)]


class Kept(dict[int, Any]):
    """The inputs of a capture that were kept, by number, in the place of all."""

    def __missing__(self, number: int) -> None:
        return None


def resume(module: torch.fx.GraphModule, call: str, unforeseen: Unforeseen, arguments: Sequence[Any]) -> list[Any]:
    """Run a capture from behind the node ``call``, on its arguments, of the inputs those that were kept; returns the
    results of the backward."""
    nodes = {node.name: node for node in module.graph.nodes}
    stopped = nodes[call]
    known: Mapping[torch.fx.Node, Any] = dict(zip(find_rest(stopped), unforeseen.rest, strict=True))
    done: dict[torch.fx.Node, Any] = {stopped: unforeseen.given}
    again = {*_begun_slices(stopped)}
    for node in module.graph.nodes:
        if node is stopped:
            break
        if not (is_source(node) or node in again):
            done[node] = known.get(node)
    interpreter = torch.fx.Interpreter(module)
    interpreter.extra_traceback = False
    return list(interpreter.run(*arguments, initial_env=done))
