# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which convolutions of a library take and give images with channels last.

cuDNN has its kernels for images whose channels lie next to one another; given images plane by plane it turns them
around before and behind each. Convolutions that take and give them with channels last spare that, if what is computed
between them can be computed so too (``permutations.py``): what cannot is turned around instead.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from retrograd.frontend.libraries.ops import POOLS
from retrograd.frontend.libraries.permutations import find_rule, is_spread, keeps_axes, read_arguments

aten = torch.ops.aten

CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


@dataclass(frozen=True)
class Turns:
    """Bytes of images that a library does not turn around any more, and of those that compiled code has to."""

    spared: int
    left: int

    @property
    def pay(self) -> bool:
        """Whether it is worth while: compiled code takes twice as long for a byte."""
        return 2 * self.left <= self.spared


def is_image(node: Any) -> bool:
    """Whether a node gives images [N, C, H, W] of fixed sizes, with more than one channel and more than one place."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, Tensor) or value.dim() != 4 or not all(isinstance(n, int) for n in value.shape):
        return False
    return value.shape[1] > 1 and value.shape[2] * value.shape[3] > 1


def is_for_channels_last(op: Node) -> bool:
    """Whether a convolution is one of images of fixed sizes."""
    if op.target not in CONVOLUTIONS:
        return False
    return all(is_image(image) for image in _images_of(op))


def find_turned(graph: Graph, ops: Sequence[Node]) -> list[Node]:
    """Those of a library's ops that are to take and give images with channels last: all convolutions that can, or none
    where that does not pay."""
    convolutions = [op for op in ops if is_for_channels_last(op)]
    return convolutions if count_turns(graph, convolutions).pay else []


def count_turns(graph: Graph, convolutions: Sequence[Node]) -> Turns:
    """Counts the tensors that are turned around, by whom, if these convolutions take and give images with channels
    last."""
    wanted, last = set(convolutions), set[Node]()
    # In compiled code, each tensor once.
    left: set[Node] = set()
    spared: list[Node] = []
    for node in graph.nodes:
        given = [n for n in node.all_input_nodes if n in last]
        if node in wanted:
            images = _images_of(node)
            results = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0] or [node]
            results = [] if isinstance(node.meta["val"], (tuple, list)) and results == [node] else results
            left.update(image for image in images if image not in last)
            spared += [*images, *results]
            last.update(results)
        elif node.target in POOLS:
            is_forward = node.target is aten.max_pool2d_with_indices.default
            followed = node.args[0] if is_forward else node.args[-1]
            if followed in last:
                last.update(node.users if is_forward else [node])
            else:
                left.update(given)
        elif find_rule(node) is None:
            left.update(given if node.target is not operator.getitem else ())
        elif given and keeps_axes(node):
            last.add(node)
            size = node.meta["val"].numel()
            others = [n for n in node.all_input_nodes if n not in last and n.meta["val"].numel() == size]
            left.update(n for n in others if not is_spread(n))
    return Turns(count_bytes(spared), count_bytes(left))


def _images_of(convolution: Node) -> list[Node]:
    """The image or images that a convolution takes besides its filters."""
    count = 2 if convolution.target is aten.convolution_backward.default else 1
    return read_arguments(convolution)[:count]


def count_bytes(nodes: Iterable[Node]) -> int:
    """Bytes of what nodes give."""
    return sum(math.prod(n.meta["val"].shape) * n.meta["val"].element_size() for n in nodes)
