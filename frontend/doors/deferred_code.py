# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Graph modules whose Python code is written when they are first called, if they ever are.

PyTorch writes and compiles the code of a graph whenever a module of it is made, and again at each ``recompile()``. Most
of our graphs change many times before they are called, or are only read: a tenth of what tracing takes went there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module


def deferring_code() -> AbstractContextManager[None]:
    """Have PyTorch make such modules of what it traces, as for Inductor; it writes the code of a joint graph four
    times otherwise."""
    return _use_lazy_graph_module(True)


def make_graph_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module that runs ``graph``, with what it needs of ``root``'s attributes."""
    return _LazyGraphModule(root, graph)


def recompile_when_called(graph_module: torch.fx.GraphModule) -> None:
    """To be called in place of ``recompile()`` after the graph of ``graph_module`` was changed. The next call runs the
    graph as it is by then. Until then the attribute ``code`` is that from before."""
    if isinstance(graph_module, _LazyGraphModule):
        graph_module.recompile()
        return

    def forward(self: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        self.recompile()
        return self(*args, **kwargs)

    # Each graph module is the one instance of a class of its own, and ``recompile()`` sets the same attribute.
    type(graph_module).forward = forward
