# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds parts of a captured backward that only PyTorch's engine can run, before anything of it has run."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from retrograd.frontend.autograd.engine.python_calls import Frame, accumulate_into, find_source
from retrograd.frontend.hooks.hook_marks import describe_hook

# Gives the node of the engine that runs: of a captured backward none does.
_ASKS_FOR_NODE = "_current_autograd_node"


def find_engine_only(graph: torch.fx.Graph, frame: Frame) -> str | None:
    """Why a backward has to run in PyTorch's engine; None where it need not."""
    for hook in frame.hooks:
        if _ASKS_FOR_NODE in _names_of(hook):
            return f"hook {describe_hook(hook)} asks for the node that runs ({_ASKS_FOR_NODE})"
    for node in graph.find_nodes(op="call_function", target=accumulate_into):
        place, number = find_source(node.args[0])
        if place == "inputs" and (layout := frame.inputs[number].layout) is not torch.strided:
            return f"a leaf is of layout {layout}, which a gradient of another cannot be assigned to from Python"
    return None


def _names_of(hook: Any) -> tuple[str, ...]:
    """The names in a hook's code."""
    while isinstance(hook, partial):
        hook = hook.func
    called = hook if hasattr(hook, "__code__") else type(hook).__call__
    return tuple(called.__code__.co_names) if hasattr(called, "__code__") else ()
