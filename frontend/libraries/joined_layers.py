# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Has what lies between the layers of LSTMs, GRUs and RNNs run in one island with them: the states of both directions
joined, the gradients that both give added up. It takes torch some microseconds, where a compiled function between two
islands takes fifty."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from retrograd.frontend.layers.cudnn_layers import CUDNN_LAYERS
from retrograd.frontend.layers.lstm_layers import LSTM_LAYER, LSTM_LAYER_BACKWARD
from retrograd.frontend.libraries.ops import LIBRARY

aten = torch.ops.aten
WITH = "retrograd_with"
"""In a node's ``meta``: the name of the op whose island it is part of."""
_LAYERS = (LSTM_LAYER, LSTM_LAYER_BACKWARD, *CUDNN_LAYERS)
_BETWEEN = (aten.cat.default, aten.add.Tensor, aten.clone.default)


def join_layers(graph: Graph) -> None:
    """Mark what lies between layers that a library computes as part of the island of the first that takes it."""
    found: list[Node] = [node for op in _LAYERS for node in graph.find_nodes(op="call_function", target=op)]
    layers = {node.name: node for node in found if LIBRARY in node.meta}
    if not layers:
        return
    # From the last on: what takes a value is marked before what gives it.
    for node in reversed(graph.nodes):
        takers = [layers.get(user.meta.get(WITH, user.name)) for user in node.users]
        if takers and None not in takers and node.target in _BETWEEN and _is_given(node, layers):
            first = min(taker for taker in takers if taker is not None)
            node.meta = {**node.meta, LIBRARY: first.meta[LIBRARY], WITH: first.name}


def _is_given(value: Node, layers: Mapping[str, Node]) -> bool:
    """Whether a value is a result of a layer, or made of such results alone."""
    if value.target is operator.getitem:
        source = value.args[0]
        return isinstance(source, Node) and source.name in layers
    return value.target in _BETWEEN and all(_is_given(n, layers) for n in value.all_input_nodes)
