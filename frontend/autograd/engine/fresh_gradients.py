# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Leaves that had no gradient before a backward.

PyTorch finds a capture again by its graph and by which leaves have a gradient. A backward that is done has given them
one: asked for the same graph again, PyTorch traced it a second time, 0.9 of the 2.2 CPU seconds that this process spent
on the first step of eighteen layers. Without those gradients it finds the capture that has just run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from retrograd.frontend.autograd.engine.engine_order import read_node_graph
from retrograd.frontend.autograd.tracing.compiler import BackwardCall

_ACCUMULATES = "torch::autograd::AccumulateGrad"


def find_fresh_leaves(call: BackwardCall) -> list[Tensor]:
    """The leaves that ``call`` may give a gradient, and that have none yet; none of a call that PyTorch refuses."""
    if not all(given.requires_grad for given in (*call.roots, *call.inputs) if isinstance(given, Tensor)):
        return []
    graph = read_node_graph(call.roots, call.inputs)
    # By name: a custom function's node has whatever attributes its user gave it.
    leaves = [node.variable for node, name in zip(graph.nodes, graph.names[1:], strict=True) if name == _ACCUMULATES]
    return [leaf for leaf in leaves if leaf.is_leaf and leaf.grad is None]


@contextlib.contextmanager
def without_gradients(leaves: Sequence[Tensor]) -> Iterator[None]:
    """While this is open, ``leaves`` have no gradients; afterwards, the same tensors again. One whose gradient Python
    may not assign keeps it: PyTorch's engine may give a leaf what its setter refuses."""
    hidden: list[tuple[Tensor, Tensor]] = []
    try:
        for leaf in leaves:
            if leaf.grad is not None and _can_assign(leaf, leaf.grad):
                hidden.append((leaf, leaf.grad))
                leaf.grad = None
        yield
    finally:
        for leaf, gradient in hidden:
            leaf.grad = gradient


def _can_assign(leaf: Tensor, gradient: Tensor) -> bool:
    try:
        leaf.grad = gradient
    except (RuntimeError, TypeError):
        return False
    return True
