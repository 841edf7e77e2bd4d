# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Convolutions of a trace that kernels of our own compute, as ops of images with channels last."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from retrograd.frontend.decompositions.convolutions.kernel_calls import takes_backward, takes_forward
from retrograd.frontend.decompositions.convolutions.windows import spread_axes
from retrograd.frontend.layers.convolution_ops import (
    CONVOLUTION_LAST,
    CONVOLUTION_LAST_FILTERS,
    CONVOLUTION_LAST_IMAGES,
    FIRST,
    LAST,
)
from retrograd.frontend.libraries.ops import LIBRARY

aten = torch.ops.aten
_RANK = 2


def find_kernel_convolutions(graph: Graph) -> list[Node]:
    """The convolutions of a graph that kernels are to compute now, none of which has a bias: those that no library
    does."""
    found = []
    for node in graph.nodes:
        if node.target not in (aten.convolution.default, aten.convolution_backward.default) or LIBRARY in node.meta:
            continue
        args: Any = map_arg(node.args, lambda value: value.meta["val"])
        if node.target is aten.convolution.default:
            is_taken = args[2] is None and takes_forward(*args[:2], *args[3:])
        else:
            is_taken = not args[10][2] and takes_backward(*args[:3], *args[4:10])
        if is_taken:
            found.append(node)
    return found


def lay_out_convolutions(graph: Graph, convolutions: Sequence[Node]) -> None:
    """Put ops of images with channels last in the place of convolutions, between permutations."""
    for node in convolutions:
        with graph.inserting_before(node):
            if node.target is aten.convolution.default:
                _lay_out_forward(graph, node)
            else:
                _lay_out_backward(graph, node)


def _lay_out_forward(graph: Graph, node: Node) -> None:
    x, weight, _, stride, padding, dilation, transposed, *_ = node.args
    window = _window(stride, padding, dilation)
    sizes = [*node.meta["val"].shape]
    if transposed:
        result = _call(graph, node, CONVOLUTION_LAST_IMAGES, x, weight, window, [*sizes[2:], sizes[1]])
    else:
        result = _call(graph, node, CONVOLUTION_LAST, x, weight, window, sizes[2:])
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _lay_out_backward(graph: Graph, node: Node) -> None:
    grad, x, weight, _, stride, padding, dilation, transposed, *_ = node.args
    window = _window(stride, padding, dilation)
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise ValueError(f"{user} takes all of {node}")
        value = user.meta["val"]
        if value is None and not user.users:
            # Of what the call was not asked for.
            graph.erase_node(user)
            continue
        if user.args[1] == 0 and transposed:
            result = _call(graph, user, CONVOLUTION_LAST, grad, weight, window, [*value.shape[2:]])
        elif user.args[1] == 0:
            size = [*value.shape[2:], value.shape[1]]
            result = _call(graph, user, CONVOLUTION_LAST_IMAGES, grad, weight, window, size)
        else:
            narrow, wide = (x, grad) if transposed else (grad, x)
            size = [*value.shape[2:], value.shape[1]]
            result = _call(graph, user, CONVOLUTION_LAST_FILTERS, narrow, wide, window, size)
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(node)


def _call(graph: Graph, like: Node, op: Any, first: Any, second: Any, window: list[int], size: list[int]) -> Node:
    """A call of an op, which gives what ``like`` does; permuted as that is."""
    taken = [_permuted(graph, like, value, LAST) for value in (first, second)]
    made = graph.call_function(op, (*taken, window, size))
    made.meta = {**like.meta, "val": op(*(value.meta["val"] for value in taken), window, size)}
    made.meta.pop("tensor_meta", None)
    back = graph.call_function(aten.permute.default, (made, [*FIRST]))
    back.meta = {**like.meta}
    return back


def _permuted(graph: Graph, like: Node, value: Any, order: Sequence[int]) -> Node:
    node = graph.call_function(aten.permute.default, (value, [*order]))
    node.meta = {"val": value.meta["val"].permute(order), "stack_trace": like.stack_trace}
    return node


def _window(*numbers: Any) -> list[int]:
    return [number for pair in numbers for number in spread_axes(pair, _RANK)]
