# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sparse tensors, which executables do not have: neither as arguments nor as gradients."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from retrograd.frontend.python.source_locations import CaptureError, source_place


def refuse_sparse_layouts(graph_module: GraphModule) -> None:
    """Refuse a graph that makes or takes a tensor of another layout than ``torch.strided``; the gradient of an
    ``nn.Embedding(sparse=True)`` is one.

    Raises:
        CaptureError: there is such a tensor; names the op and the line of the user's code.
    """
    for node in graph_module.graph.nodes:
        for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
                place = source_place(node.stack_trace)
                raise CaptureError(
                    f"{node.target}{f' at {place}' if place else ''} is a tensor of layout {value.layout}",
                    "use dense tensors, such as the gradients of an embedding without sparse=True; or "
                    "retrograd.enable(), which leaves a backward of sparse gradients to eager",
                )
