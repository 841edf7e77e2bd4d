# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes to windows of a tensor, views made by ``Tensor.unfold``, which PyTorch's functionalization gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.python.source_locations import CaptureError

aten = torch.ops.aten


def refusing_written_windows(table: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """``table``, a model's decompositions, less what windows that were written to become.

    Functionalization puts these back by ``aten.unfold_backward``, as if they were a gradient: elements in no window
    become zero, and those in several are added up. ``torch.compile`` computes that without a word. The gradient itself
    is only ever computed while autograd's engine runs.
    """
    gradient = table[aten.unfold_backward.default]

    def unfold_backward(grad: Tensor, sizes: Any, dim: int, size: int, step: int) -> Any:
        if torch._C._current_graph_task_id() == -1:
            raise CaptureError(
                "the model writes to windows that Tensor.unfold gave, or to a view of them, which are views: in a "
                "graph, elements in no window or in several would be lost",
                "write to x.unfold(...).clone(), or to the tensor itself",
            )
        return gradient(grad, sizes, dim, size, step)

    return {**table, aten.unfold_backward.default: unfold_backward}
