# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which recurrent layers of a graph of Dynamo's are too long for a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from retrograd.frontend.layers.recurrent_frames import MOST_STEPS, find_long_recurrence


def _graph(target: Any, sequence: Tensor, *rest: Any) -> GraphModule:
    """A graph with one call of a recurrent layer, whose weights are not looked at."""
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = sequence
    graph.output(graph.call_function(target, (x, *(x if leaf is None else leaf for leaf in rest))))
    return GraphModule(nn.Module(), graph)


@pytest.mark.parametrize(
    ("layers", "bidirectional", "batch_first", "steps"),
    [(1, False, False, 40), (2, True, False, 160), (1, True, True, 4), (51, False, True, 102)],
)
def test_counts_steps_of_layers_and_directions(layers: int, bidirectional: bool, batch_first: bool, steps: int) -> None:
    module = _graph(torch.gru, torch.empty(40, 2, 3), None, [], True, layers, 0.0, False, bidirectional, batch_first)
    reason = find_long_recurrence(module)
    assert (reason is None) is (steps <= MOST_STEPS)
    assert reason is None or f"{steps} steps, written out" in reason


def test_sizes_of_a_packed_sequence_are_data() -> None:
    module = _graph(torch.lstm, torch.empty(7, 3), None, (None, None), [], True, 1, 0.0, False, False)
    assert "PackedSequence" in (find_long_recurrence(module) or "")


def test_graphs_without_recurrent_layers_have_none() -> None:
    assert find_long_recurrence(_graph(torch.sin, torch.empty(200))) is None
