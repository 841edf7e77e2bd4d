# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Gradients that a function takes itself, by ``torch.autograd.grad``, where Dynamo has them in the function's graph.

Of a tensor that comes from outside, a parameter say, the graph has no hooks: in eager these see such a gradient too,
and may replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def heeding_hooks(compiled: Callable[..., Any], graph_module: torch.fx.GraphModule) -> Callable[..., Any]:
    """``compiled``, which a graph of Dynamo's became; the graph runs in eager where it takes a gradient and one of its
    arguments has a hook."""
    if not graph_module.graph.find_nodes(op="call_function", target=torch.autograd.grad):
        return compiled

    def run(*arguments: Any) -> Any:
        return graph_module.forward(*arguments) if _have_hooks(arguments) else compiled(*arguments)

    return run


def _have_hooks(arguments: Sequence[Any]) -> bool:
    return any(isinstance(argument, Tensor) and argument._backward_hooks for argument in arguments)
