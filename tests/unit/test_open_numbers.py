# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Graphs that took Python floats take tensors of one element, and compute the same for any number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from retrograd.frontend.autograd.sizes.open_numbers import take_floats
from retrograd.frontend.python.source_locations import CaptureError

aten = torch.ops.aten
Function = Callable[[torch.Tensor, Any], torch.Tensor]


def trace(function: Function, x: torch.Tensor) -> torch.fx.GraphModule:
    """A graph of a tensor and a float that is not compiled in."""
    env = ShapeEnv()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    source = ConstantSource("factor")
    symbol = env.create_unspecified_symbol(0.3, source, DimDynamic.DYNAMIC)
    factor = env.create_symfloatnode(symbol, hint=0.3, source=source)
    with mode:
        graph_module = make_fx(function, tracing_mode="real")(torch.empty_like(x), factor)
    take_floats(graph_module, mode)
    return graph_module


@pytest.mark.parametrize(
    "function",
    [
        lambda x, s: x * s,
        lambda x, s: aten.mul.Scalar(x, s),
        lambda x, s: x - (2 * s + 1) / s,
        lambda x, s: aten.add.Tensor(x, x * x, alpha=s),
        lambda x, s: aten.rsub.Scalar(x, s),
        lambda x, s: aten.clamp.default(x, -s, s),
        lambda x, s: aten.clamp.default(x, s, 2.0),
        lambda x, s: torch.where(x > s, x, s),
        lambda x, s: x + aten.full.default([4], s, dtype=torch.float32),
        lambda x, s: x + aten.full_like.default(x, s),
        lambda x, s: x * torch.sym_sqrt(s),
        lambda x, s: x.pow(2) * -s,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_take_tensors(function: Function, dtype: torch.dtype) -> None:
    x = torch.tensor([-2, -0.25, 0.25, 3]).to(dtype)
    graph_module = trace(function, x)
    for number in (0.3, 0.75, 1.0):
        expected = function(x, number)
        found = graph_module(x, torch.tensor(number, dtype=torch.float64))
        assert found.dtype == expected.dtype and found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=1e-6)


def test_integers_times_a_number_are_single_precision() -> None:
    found = trace(lambda x, s: x * s, torch.arange(4))(torch.arange(4), torch.tensor(0.5, dtype=torch.float64))
    torch.testing.assert_close(found, torch.arange(4) * 0.5)


def test_an_op_that_takes_no_tensor_is_named() -> None:
    with pytest.raises(CaptureError, match=r"aten\.constant_pad_nd\.default.* takes a number as such"):
        trace(lambda x, s: aten.constant_pad_nd.default(x, [1, 1], s), torch.ones(4))
