# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds which inputs of a forward autograd comes to from which of its outputs.

A traced gradient may depend on no tangent where eager's depends on one: a product of tensors without elements, and the
derivative of a sign, are zeros whatever the tangent. Eager gives such a gradient all the same where the loss uses the
output, and none where it leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    GradAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

from retrograd.frontend.doors.absent_tangents import is_tangent, tangents_behind

Reached = Mapping[str | int, frozenset[int]]
"""The outputs, by number, from which autograd comes to an input: a parameter or buffer by its name, an argument by its
number."""


def find_reached(outputs: Sequence[torch.Tensor], inputs: Mapping[str | int, torch.Tensor]) -> Reached:
    """From which of ``outputs`` autograd comes to each of ``inputs``; nothing where no two outputs have gradients."""
    # Modes that watch what a model asks of its tensors are to see none of this.
    with torch._C.DisableTorchFunction():
        return _find_reached(outputs, inputs)


def _find_reached(outputs: Sequence[torch.Tensor], inputs: Mapping[str | int, torch.Tensor]) -> Reached:
    roots = [(number, output.grad_fn) for number, output in enumerate(outputs) if output.grad_fn is not None]
    if len(roots) < 2:
        return {}
    behind: dict[Any, int] = {}
    for number, root in roots:
        behind[root] = behind.get(root, 0) | 1 << number
    for node in _in_order([root for _, root in roots]):
        for following, _ in node.next_functions:
            if following is not None:
                behind[following] = behind.get(following, 0) | behind[node]
    leaves = {id(node.variable): bits for node, bits in behind.items() if hasattr(node, "variable")}
    found = {}
    for name, tensor in inputs.items():
        bits = leaves.get(id(tensor), 0) if tensor.grad_fn is None else behind.get(tensor.grad_fn, 0)
        found[name] = frozenset(number for number, _ in roots if bits >> number & 1)
    return found


def _in_order(roots: Sequence[Any]) -> list[Any]:
    """The nodes of autograd's graph behind ``roots``, each before those that it leads to."""
    finished: list[Any] = []
    seen: set[Any] = set()
    waiting = [(root, False) for root in roots]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            finished.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(following, False) for following, _ in node.next_functions if following is not None]
    return finished[::-1]


def tangents_of_gradients(
    graph_module: torch.fx.GraphModule, results: Sequence[Any], num_forward: int, reached: Reached
) -> tuple[frozenset[str], ...]:
    """The tangents, by name, without all of which eager has no gradient, of each gradient of a joint graph: those that
    it depends on, or else those of the outputs from which autograd comes to its input. ``results`` describes what the
    graph gives, of which the first ``num_forward`` are no gradients."""
    tangents: dict[int, set[str]] = {}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        if is_tangent(node) and isinstance(node.meta.get("desc"), TangentAOTInput):
            tangents.setdefault(_output_number(node.meta["desc"].output), set()).add(node.name)
    behind, found = tangents_behind(graph_module), []
    gradients: Any = graph_module.graph.output_node().args[0]
    for gradient, description in zip(gradients[num_forward:], results[num_forward:], strict=True):
        names = behind[gradient] if isinstance(gradient, torch.fx.Node) else frozenset()
        if isinstance(description, GradAOTOutput) and _has_constant_term(gradient, behind):
            numbers = reached.get(_input_name(description.grad_of), frozenset())
            names = names.union(*(tangents.get(number, ()) for number in numbers))
        found.append(names)
    return tuple(found)


def _has_constant_term(gradient: Any, behind: Mapping[torch.fx.Node, frozenset[str]]) -> bool:
    """Whether a gradient, or a term of it, depends on no tangent, and so is zeros."""
    waiting, seen = [gradient], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, torch.fx.Node) or node in seen:
            continue
        seen.add(node)
        if not behind[node]:
            return True
        if node.target is torch.ops.aten.add.Tensor:
            waiting += node.args
    return False


def _output_number(description: Any) -> int:
    """The number of the model's output that a tangent is of; -1 for what is written to."""
    if isinstance(description, IntermediateBaseAOTOutput):
        return _output_number(description.base_of)
    return description.idx if isinstance(description, PlainAOTOutput) else -1


def _input_name(description: AOTInput) -> str | int:
    if isinstance(description, PlainAOTInput):
        return description.idx
    return str(getattr(description, "target", ""))
