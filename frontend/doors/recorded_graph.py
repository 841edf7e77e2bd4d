# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The graph that autograd made of a forward, in words: which nodes, what they keep, where each hands gradients to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node

# The type of nodes that PyTorch has no Python type for: C++ of others, TorchScript, and a few of its own. What they
# compute with is in no attribute.
_UNNAMED = "CppFunction"
_LEAF = "torch::autograd::AccumulateGrad"


class Doubt(Exception):
    """A model does what no record shows; the message says what."""


def describe_graph(roots: Iterable[torch.Tensor], describe_leaf: Callable[[torch.Tensor], str]) -> Iterator[str]:
    """Describe the graph behind some tensors.

    Raises:
        Doubt: a node computes what its name does not say.
    """
    numbers: dict[Node, int] = {}
    waiting: list[Node] = []
    for root in roots:
        node = root.grad_fn
        yield "root"
        yield "none" if node is None else f"{_number(node, numbers, waiting)} {root.output_nr}"
    while waiting:
        node = waiting.pop()
        yield node.name()
        for child, place in node.next_functions:
            yield "none" if child is None else f"{_number(child, numbers, waiting)} {place}"
        yield from _kept(node, describe_leaf)


def is_ours(function: type[torch.autograd.Function]) -> bool:
    """Whether a function with a gradient in Python is one of retrograd's."""
    return function.__module__.startswith("retrograd.")


def _number(node: Node, numbers: dict[Node, int], waiting: list[Node]) -> int:
    if node not in numbers:
        numbers[node] = len(numbers)
        waiting.append(node)
    return numbers[node]


def _kept(node: Any, describe_leaf: Callable[[torch.Tensor], str]) -> Iterator[str]:
    function = getattr(type(node), "_forward_cls", None)
    if function is not None and not is_ours(function):
        raise Doubt(f"Python of the user's computes a gradient: {function.__qualname__}")
    if type(node).__name__ == _UNNAMED:
        raise Doubt(f"C++ that shows nothing of itself computes a gradient: {node.name()}")
    if node.name() == _LEAF:
        yield describe_leaf(node.variable)
        return
    for name in sorted(name for name in dir(node) if name.startswith("_saved_")):
        # A tensor that a node keeps is unpacked to another one at each look.
        yield f"{name} {_describe(getattr(node, name))}"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {tuple(value.stride())} {value.requires_grad}"
    if isinstance(value, tuple | list):
        return f"({','.join(map(_describe, value))})"
    return f"{type(value).__name__} {value!r}"
