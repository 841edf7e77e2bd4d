# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The steps that every traced graph goes through, and what their order is for."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.autograd.tracing import trace
from retrograd.frontend.doors import capture, dynamo
from retrograd.frontend.hooks.pack_hooks import PACKED_BY, HookPair
from retrograd.frontend.layers.random_ops import DRAW_SEED, UNIFORM, find_seed
from retrograd.frontend.preparation.prepare import PREPARE, Traced, prepare, prepare_copied

aten = torch.ops.aten


def test_the_three_doors_share_one_list() -> None:
    assert vars(trace)["prepare"] is prepare
    assert all(vars(door)["prepare_copied"] is prepare_copied for door in (capture, dynamo))
    assert all(step.why for step in PREPARE)


def test_a_copy_is_the_graph_as_it_was_traced() -> None:
    """But for its random ops, which draw what those of the prepared graph draw."""

    def function(x: torch.Tensor) -> torch.Tensor:
        left_out = torch.ops.retrograd.uniform(torch.ops.retrograd.draw_seed(), 0, [3])[:0]
        drawn = torch.ops.retrograd.uniform(torch.ops.retrograd.draw_seed(), 0, [3])
        return torch.cat([torch.complex(x, drawn).exp().real, left_out * 2])

    traced = make_fx(function, tracing_mode="fake")(torch.rand(3))
    copied, x = prepare_copied(Traced(traced, is_joint=True)), torch.randn(3)
    assert copied.graph.find_nodes(op="call_function", target=aten.complex.default)
    assert not traced.graph.find_nodes(op="call_function", target=aten.complex.default)
    torch.manual_seed(0)
    expected = copied(x)
    torch.manual_seed(0)
    torch.testing.assert_close(traced(x), expected)


def test_a_graph_goes_through_all_steps() -> None:
    """What only an empty tensor reads, two draws, complex numbers."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.complex(x, x) * 2j
        first = torch.ops.retrograd.uniform(torch.ops.retrograd.draw_seed(), 0, [3])
        second = torch.ops.retrograd.uniform(torch.ops.retrograd.draw_seed(), 0, [3])
        return z.real + first + second, x.sin()[:0] * 2

    traced = make_fx(function, tracing_mode="fake")(torch.rand(3))
    pair = HookPair(lambda t: t.bfloat16(), lambda t: t.float())
    prepare(Traced(traced, hooks=pair, is_joint=True))
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert aten.sin.default not in targets
    assert targets.count(DRAW_SEED) == 1
    assert [node.args[1] for node in traced.graph.find_nodes(op="call_function", target=UNIFORM)] == [0, 1]
    values = [node.meta["val"] for node in traced.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert not any(value.is_complex() for value in values)
    # What the steps wrote is packed as what was traced.
    assert all(PACKED_BY in node.meta for node in traced.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("is_joint", [True, False])
def test_a_forward_alone_saves_nothing(is_joint: bool) -> None:
    traced = make_fx(torch.sin, tracing_mode="fake")(torch.rand(3))
    prepare(Traced(traced, hooks=HookPair(lambda t: t, lambda t: t), is_joint=is_joint))
    assert any(PACKED_BY in node.meta for node in traced.graph.nodes) == is_joint
    assert find_seed(traced.graph) is None
