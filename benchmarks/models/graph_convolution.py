# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Graph convolutions by scattering along edges. After "Semi-Supervised Classification with Graph Convolutional
Networks" (Kipf and Welling, 2016)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.case import Case, Entry


class GraphConvolution(nn.Module):
    """Sums a linear map of each node over its edges, weighted by the degrees of their ends: [nodes, features]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degree = nodes.new_ones(len(nodes)).index_add(0, target, nodes.new_ones(edges.shape[1]))
        scale = degree.rsqrt()
        x = self.linear(nodes)
        messages = x[source] * (scale[source] * scale[target]).unsqueeze(-1)
        # Each node is a neighbour of its own.
        own = x * (1 / degree).unsqueeze(-1)
        spread = target.unsqueeze(-1).expand_as(messages)
        return own.scatter_add(0, spread, messages) + self.bias  # type: ignore[no-any-return]


class GraphNetwork(nn.Module):
    """Features [nodes, features] and edges, int64 [2, edges], to logits per node [nodes, classes]."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = GraphConvolution(features, hidden), GraphConvolution(hidden, classes)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return self.second(F.relu(self.first(nodes, edges)), edges)  # type: ignore[no-any-return]


def graph_convolution(nodes: int, edges: int, features: int, hidden: int, classes: int) -> Case:
    labels = torch.randint(classes, (nodes,))
    graph = torch.randint(nodes, (2, edges))
    model = GraphNetwork(features, hidden, classes)
    return Case(model, (torch.randn(nodes, features), graph), lambda y: F.cross_entropy(y, labels))


ENTRIES = (
    Entry(
        "graph_convolution",
        graph_convolution,
        {
            "test": {"nodes": 6, "edges": 14, "features": 5, "hidden": 8, "classes": 3},
            "bench": {"nodes": 4096, "edges": 32768, "features": 256, "hidden": 128, "classes": 16},
        },
    ),
)
