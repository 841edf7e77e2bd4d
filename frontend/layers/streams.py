# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One seed for all random ops of a traced graph, and for each a stream of numbers of its own."""

from __future__ import annotations

import torch

from retrograd.frontend.doors.deferred_code import recompile_when_called
from retrograd.frontend.layers.dropped_attention import ATTENTION, ATTENTION_BACKWARD, ATTENTION_BACKWARD_WITH_MASK
from retrograd.frontend.layers.random_ops import DRAW_SEED, UNIFORM
from retrograd.frontend.python.source_locations import CaptureError

# The places of streams among the arguments of ops, and of the log-sum-exps.
_STREAMS = {UNIFORM: 1, ATTENTION: 8}
_BACKWARD_STREAM, _LSE = 11, 5
_BACKWARDS = (ATTENTION_BACKWARD, ATTENTION_BACKWARD_WITH_MASK)


def share_seed(graph_module: torch.fx.GraphModule) -> None:
    """Give a traced graph one seed, drawn in front of all else, and each random op in it a stream of its own.

    Raises:
        CaptureError: the backward draws numbers of its own; names the line.
    """
    graph = graph_module.graph
    numbered = [node for node in graph.nodes if node.target in _STREAMS]
    for stream, node in enumerate(numbered):
        if node.meta.get("partitioner_tag") == "is_backward":
            raise CaptureError(
                f"the backward draws random numbers, at {_line(node)}",
                "under activation checkpointing they would not be the forward's: checkpoint a part that draws none, or "
                "leave out the checkpoint, since partition='min-cut' recomputes what is cheap",
            )
        node.update_arg(_STREAMS[node.target], stream)
    for target in _BACKWARDS:
        for node in graph.find_nodes(op="call_function", target=target):
            # Those of the forward: it has the log-sum-exps of that.
            node.update_arg(_BACKWARD_STREAM, _find_forward(node).args[_STREAMS[ATTENTION]])
    seeds = graph.find_nodes(op="call_function", target=DRAW_SEED)
    if not seeds:
        return
    first = seeds[0]
    (*_, last) = graph.find_nodes(op="placeholder") or (None,)
    if last is not None:
        last.append(first)
    for seed in seeds[1:]:
        seed.replace_all_uses_with(first)
        graph.erase_node(seed)
    if not first.users:
        graph.erase_node(first)
    graph.lint()
    recompile_when_called(graph_module)


def take_streams(graph: torch.fx.Graph, other: torch.fx.Graph) -> None:
    """Give random ops the streams of those that have the same names in another graph."""
    for op, place in (*_STREAMS.items(), *((op, _BACKWARD_STREAM) for op in _BACKWARDS)):
        streams = {node.name: node.args[place] for node in other.find_nodes(op="call_function", target=op)}
        for node in graph.find_nodes(op="call_function", target=op):
            if node.name in streams:
                node.update_arg(place, streams[node.name])


def _find_forward(backward: torch.fx.Node) -> torch.fx.Node:
    """The attention whose gradients ``backward`` gives."""
    lse = backward.args[_LSE]
    if not isinstance(lse, torch.fx.Node) or not isinstance(forward := lse.args[0], torch.fx.Node):
        raise AssertionError(f"{backward} has no log-sum-exps of a forward's")
    return forward


def _line(node: torch.fx.Node) -> str:
    return (node.stack_trace or "an unknown place").strip().splitlines()[0].strip()
