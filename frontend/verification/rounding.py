# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How far from eager's values rounding may take those of a compiled graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

Tolerance = Callable[[torch.dtype], float]


def find_tolerances(graph: Graph, tolerance_of: Tolerance) -> dict[Node, float]:
    """The relative error that rounding explains, of each value of a graph whose nodes have ``val`` metadata.

    A value is allowed what its own dtype is, and what those are that it is computed from: rounded in bfloat16 elsewhere
    than eager does, under autocast say, they differ by that, whatever they are widened to. Arguments are exact, and so
    are integers.
    """
    found: dict[Node, float] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        is_tensor = isinstance(value, torch.Tensor)
        own = tolerance_of(value.dtype) if is_tensor and node.op != "placeholder" else 0.0
        is_exact = is_tensor and not (value.is_floating_point() or value.is_complex())
        inherited = () if is_exact else (found[source] for source in node.all_input_nodes)
        found[node] = max((own, *inherited))
    return found
