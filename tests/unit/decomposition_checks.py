# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""An op traced with the decomposition table beside the same op in eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.decompositions.table import decomposition_table

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def tensors_of(value: Any) -> list[Tensor | None]:
    return [value] if isinstance(value, Tensor) else list(value)


def assert_close(ours: Any, theirs: Any, *, strides: bool = False, least_scale: float = 1e-3) -> None:
    assert len(tensors_of(ours)) == len(tensors_of(theirs))
    for mine, reference in zip(tensors_of(ours), tensors_of(theirs), strict=True):
        assert (mine is None) == (reference is None or not isinstance(reference, Tensor))
        if mine is None or reference is None:
            continue
        assert mine.dtype == reference.dtype and mine.shape == reference.shape
        if strides:
            assert mine.stride() == reference.stride()
        tolerance = TOLERANCE.get(reference.dtype, 0.0)
        scale = float(reference.double().abs().nan_to_num(0, 0, 0).max()) if reference.numel() else 0.0
        torch.testing.assert_close(
            mine, reference, rtol=tolerance, atol=tolerance * max(scale, least_scale), equal_nan=True
        )


def with_types(cases: Sequence[Any]) -> list[Any]:
    """Each case in float32, and the first in the other types; the rest of the product is long."""
    types = (torch.float32, torch.float64, torch.bfloat16)
    return [
        pytest.param(case, dtype, marks=[pytest.mark.long] * (number > 0 and dtype != torch.float32))
        for number, case in enumerate(cases)
        for dtype in types
    ]


def targets(graph: torch.fx.GraphModule) -> set[Any]:
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


def trace(op: Any, *args: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """The graph of ``op`` traced with the table, and its tensors."""
    leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def call(*tensors: Tensor) -> Any:
        whole = list(leaves)
        for position, tensor in zip(positions, tensors, strict=True):
            whole[position] = tensor
        inner_args, inner_kwargs = torch.utils._pytree.tree_unflatten(whole, spec)
        return op(*inner_args, **inner_kwargs)

    tensors = [leaves[i] for i in positions]
    return make_fx(call, decomposition_table=decomposition_table(), tracing_mode="fake")(*tensors), tensors


def traced(op: Any, *args: Any, gone: bool = True, **kwargs: Any) -> Any:
    """What ``op`` gives when traced with the table and run; ``gone`` says that the op itself must not be left."""
    graph, tensors = trace(op, *args, **kwargs)
    assert (op in targets(graph)) != gone
    return graph(*tensors)


def check(op: Any, *args: Any, strides: bool = False, gone: bool = True, **kwargs: Any) -> None:
    assert_close(traced(op, *args, gone=gone, **kwargs), op(*args, **kwargs), strides=strides)
