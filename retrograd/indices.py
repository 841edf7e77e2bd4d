# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Graphs of Dynamo's, which have no signature: their indices are looked at where they are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from retrograd.frontend.doors.graph_calls import CompiledFunction
from retrograd.frontend.preparation.index_bounds import find_index_bounds
from retrograd.runtime.index_bounds import IndexCheck


def refusing_wrong_indices(function: CompiledFunction, traced: torch.fx.GraphModule) -> CompiledFunction:
    """``function``, compiled from ``traced``, which refuses arguments of the graph that are indices out of range.

    Raises when called:
        IndexError: one is not.
    """
    placeholders = [node.name for node in traced.graph.find_nodes(op="placeholder")]
    places = {name: place for place, name in enumerate(function.arguments)}
    checks = [
        (places[placeholders[bound.argument]], IndexCheck(bound))
        for bound in find_index_bounds(traced.graph)
        if placeholders[bound.argument] in places
    ]
    if not checks:
        return function

    def call(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        for place, check in checks:
            problem = check.find_problem(tensors[place])
            if problem is not None:
                raise IndexError(f"{function.arguments[place]} of a compiled graph: {problem}")
        return function.call(tensors)

    return replace(function, call=call)
