# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Types of elements that the rest of the pipeline has no values for."""

from __future__ import annotations

import torch

from retrograd.frontend.source import CaptureError


def refuse_complex(graph_module: torch.fx.GraphModule) -> None:
    """Raise :class:`CaptureError` where a graph takes, gives or computes complex numbers: an executable has none."""
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype.is_complex:
            where = (node.stack_trace or "").strip().splitlines()
            place = f", at {where[0].strip()}" if where else ""
            what = (
                "an argument or a result of the model is complex"
                if node.op == "placeholder"
                else f"the op {node.target} gives complex numbers"
            )
            raise CaptureError(
                f"{what} ({value.dtype}), which are not compiled{place}",
                "compute with the real and imaginary parts as two real tensors, or leave this part to eager",
            )
