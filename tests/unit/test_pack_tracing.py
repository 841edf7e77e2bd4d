# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Pack and unpack hooks as graphs: what they compute, and what no graph can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.hooks.pack_hooks import PACKED_AS, HookPair, mark_values
from retrograd.frontend.hooks.pack_tracing import TracedPair, trace_pair, trace_pairs
from retrograd.frontend.python.source_locations import CaptureError

Hook = Callable[[Any], Any]


def trace(pack: Hook, unpack: Hook, *sizes: int, dtype: torch.dtype = torch.float32) -> TracedPair:
    with FakeTensorMode():
        like = torch.empty(sizes, dtype=dtype)
    return trace_pair(HookPair(pack, unpack), like)


def pack_float8(tensor: torch.Tensor) -> Any:
    scale = tensor.abs().amax().clamp_min(1e-12) / 448
    return {"value": (tensor / scale).to(torch.float8_e4m3fn), "scale": scale, "dtype": tensor.dtype}


def unpack_float8(packed: Any) -> torch.Tensor:
    whole: torch.Tensor = packed["value"].to(packed["dtype"]) * packed["scale"]
    return whole


def test_tensors_are_parts_and_the_rest_is_compiled_in() -> None:
    packer = trace(pack_float8, unpack_float8, 5, 3).packer()
    tensor = torch.randn(5, 3)
    parts = packer.pack(tensor)
    assert packer.parts == ("packed_0", "packed_1")
    assert [part.dtype for part in parts] == [torch.float8_e4m3fn, torch.float32]
    torch.testing.assert_close(packer.unpack(parts, (5, 3), torch.float32), unpack_float8(pack_float8(tensor)))


def test_each_type_of_value_is_traced_once() -> None:
    def graph(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos().sum(0).exp()

    with FakeTensorMode():
        traced = make_fx(graph)(torch.empty(4, 3))
    mark_values(traced, HookPair(lambda t: t.bfloat16(), lambda t: t.float()))
    packings = trace_pairs(traced)
    assert list(packings.bodies()) == ["pack_0", "pack_1", "unpack_0", "unpack_1"]
    named = {node.name: node.meta[PACKED_AS] for node in traced.graph.nodes if PACKED_AS in node.meta}
    assert named == {"sin": ["pack_0"], "cos": ["pack_0"], "sum_1": ["pack_1"], "exp": ["pack_1"]}


def test_values_that_hooks_cannot_pack_are_refused_where_they_are_saved() -> None:
    with FakeTensorMode():
        traced = make_fx(lambda x: x.sin() + x.argmax())(torch.empty(4))
    mark_values(traced, HookPair(lambda t: t.bfloat16(), lambda t: t.float()))
    packings = trace_pairs(traced)
    packings.check_saved(["sin"])
    with pytest.raises(CaptureError, match=r"make a torch.float32 of shape \[\] of a torch.int64 of shape \[\]"):
        packings.check_saved(["sin", "argmax"])


outside = torch.ones(())


@pytest.mark.parametrize(
    ("pack", "unpack", "message"),
    [
        (lambda t: t * outside, lambda t: t, "test_pack_tracing.py.*they read a tensor other than what they are given"),
        (lambda t: t * torch.tensor(2.0), lambda t: t, "they read a tensor other than what they are given"),
        (lambda t: t if t.sum() > 0 else -t, lambda t: t, "cannot be compiled in: data-dependent control flow"),
        (lambda t: t, lambda t: t + torch.rand_like(t), "cannot be compiled in: they draw random numbers"),
        (lambda t: t.half(), lambda t: t, r"make a torch.float16 of shape \[4\] of a torch.float32 of shape \[4\]"),
    ],
    ids=["reads a tensor", "makes a constant", "reads a number", "draws", "another dtype"],
)
def test_what_is_refused(pack: Hook, unpack: Hook, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        trace(pack, unpack, 4)
