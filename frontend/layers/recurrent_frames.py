# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Recurrent layers in the graphs that Dynamo captures.

Dynamo leaves any function that calls an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` to eager, and tells no backend, unless an
option says otherwise, which is set for ours (``doors/frame_settings.py``). A layer that does not become a loop in
compiled code (``recurrent.py``) is written out, an op by step. What is too long for that is left to eager with a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from retrograd.frontend.layers.recurrent import can_be_loop
from retrograd.frontend.python.source_locations import source_place

# Steps of all layers and directions of one call that is written out. 50 compile in about the time of a ResNet-50.
MOST_STEPS = 100
_LAYERS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
# How many states each has.
_STATES: dict[Any, int] = {layer: 2 if layer is torch.lstm else 1 for layer in _LAYERS}


def find_long_recurrence(graph_module: GraphModule) -> str | None:
    """Why a graph of Dynamo's has a recurrent layer that is not to be written out, with its place and a remedy;
    ``None`` where each may be."""
    casts = any(node.target is torch.amp.autocast_mode._enter_autocast for node in graph_module.graph.nodes)
    for node in graph_module.graph.nodes:
        if not casts and _is_loop(node):
            continue
        reason = _reason(node) if node.op == "call_function" and node.target in _LAYERS else None
        if reason is not None:
            place = source_place(node.meta.get("stack_trace"))
            return f"{node.target.__name__}{f' at {place}' if place else ''}: {reason}"
    return None


def _is_loop(node: Node) -> bool:
    """Whether a call is of a layer that becomes a loop, however long it is."""
    count = _STATES.get(node.target) if node.op == "call_function" else None
    if count is None or not isinstance(node.args[3], bool):
        return False
    sequence, states, weights, has_biases, batch_first = *node.args[:4], node.args[-1]
    leaves = tree_leaves((sequence, states, weights))
    found = [leaf.meta.get("example_value") for leaf in leaves if isinstance(leaf, Node)]
    values = [value for value in found if isinstance(value, Tensor)]
    a_layer = 4 if has_biases else 2
    if len(values) != len(leaves) or len(values) < 1 + count + a_layer:
        return False
    inputs, first, params = values[0], values[1 : 1 + count], values[1 + count :]
    inputs = inputs.transpose(0, 1) if batch_first and inputs.dim() == 3 else inputs
    is_projected = first[0].shape[-1] != first[-1].shape[-1]
    return inputs.dim() == 3 and not is_projected and can_be_loop(inputs, first, params[:a_layer], bool(has_biases))


def _reason(node: Node) -> str | None:
    # Sequence, states, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first; with a
    # PackedSequence's sizes after the sequence, and no batch_first.
    sequence, batch_first = node.args[0], node.args[-1]
    if not isinstance(node.args[3], bool):
        return "a PackedSequence has steps of sizes that depend on data; give it padded sequences"
    assert isinstance(sequence, Node)
    length = sequence.meta["example_value"].shape[1 if batch_first else 0]
    if not isinstance(length, int):
        return "its sequence has an open length; compile with dynamic=False, for one length after another"
    layers, bidirectional = node.args[4], node.args[7]
    assert isinstance(layers, int)
    steps = length * layers * (2 if bidirectional else 1)
    if steps > MOST_STEPS:
        return f"{steps} steps, written out, take long to compile (at most {MOST_STEPS}); compile the rest of the model"
    return None
