# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Unsigned bytes that an op computes with are int32 in the graph, and its results what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.preparation.unsigned_bytes import widen_bytes

BYTES = torch.tensor([[200, 100, 3], [7, 255, 90]], dtype=torch.uint8)
CONVERT = torch.ops.prims.convert_element_type.default


def _widened(model: Callable[..., Any], *args: Tensor) -> GraphModule:
    traced = make_fx(model, tracing_mode="fake")(*args)
    widen_bytes(traced)
    traced.graph.lint()
    traced.recompile()
    return traced


@pytest.mark.parametrize(
    "model",
    [
        lambda x, b: x * b,
        lambda x, b: (b / 255, b // 3, b >> 1, b.max(), b + b, b.sum(1)),
        lambda x, b: (torch.where(x > 0, x, b), torch.where(x > 0, b, 2 * b), torch.cat((x, b)), b.clamp(max=180)),
        lambda x, b: (b * torch.full((3,), -2, dtype=torch.int8), ~b, b > 150, b == b.flip(1)),
    ],
)
def test_it_computes_the_same_of_int32(model: Callable[..., Any]) -> None:
    x = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, 6.0]])
    traced = _widened(model, x, BYTES)
    torch.testing.assert_close(traced(x, BYTES), model(x, BYTES), rtol=0, atol=0)
    # What chooses among bytes alone gives them as they are.
    computing = [n for n in traced.graph.nodes if torch.Tag.pointwise in getattr(n.target, "tags", ())]
    computing = [n for n in computing if n.target not in (CONVERT, torch.ops.aten.where.self)]
    taken = {n.meta["val"].dtype for node in computing for n in node.all_input_nodes}
    assert torch.int32 in taken
    assert torch.uint8 not in taken


def test_what_moves_bytes_takes_them_as_they_are() -> None:
    def move(b: Tensor) -> tuple[Tensor, ...]:
        return b.t(), torch.cat((b, b)), b[:, 1:], b.clone(), b.to(torch.float32)

    traced = _widened(move, BYTES)
    assert all(node.target is not CONVERT for node in traced.graph.nodes)
    assert all(t.dtype is not torch.int32 for t in traced(BYTES))
