# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Gradients from the forward's arguments: the halves of a step as one graph; what is kept of one that passed."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from retrograd.first_calls import Keeper
from retrograd.frontend.verification.from_inputs import Forwards, join

EXP, MUL, SIN = torch.ops.aten.exp.default, torch.ops.aten.mul.Tensor, torch.ops.aten.sin.default


def halves() -> tuple[GraphModule, GraphModule]:
    """exp(x) * sin(x), of which the exponential is saved and the sine computed again."""
    forward, backward = Graph(), Graph()
    x = forward.placeholder("x")
    e, s = (
        forward.create_node("call_function", EXP, (x,), name="e"),
        forward.create_node("call_function", SIN, (x,), name="s"),
    )
    forward.output((forward.call_function(MUL, (e, s)), x, e))
    x, e, tangent = (backward.placeholder(name) for name in ("x", "e", "tangents_1"))
    s = backward.create_node("call_function", SIN, (x,), name="s")
    backward.output((backward.call_function(MUL, (tangent, backward.call_function(MUL, (e, s)))),))
    return GraphModule({}, forward), GraphModule({}, backward)


def first_call(x: Tensor) -> tuple[Forwards, GraphModule, list[Tensor]]:
    forward, backward = halves()
    results = list(forward(x))
    forwards = Forwards()
    forwards.keep(forward, [x], None, results, lambda _: None)
    return forwards, backward, results


def test_both_halves_are_one_graph() -> None:
    x = torch.randn(4)
    forwards, backward, (_, _, e) = first_call(x)
    tensors = (x, e, torch.full((4,), 2.0))
    run = forwards.find(backward, tensors)
    assert run is not None
    joined = join(run, backward, tensors)
    assert not isinstance(joined, str)
    module, arguments = joined
    # What was saved is not looked at.
    e.zero_()
    torch.testing.assert_close(module(*arguments)[0], 2.0 * x.exp() * x.sin())
    assert len(module.graph.find_nodes(op="call_function", target=SIN)) == 1


def test_overwritten_arguments_and_other_calls_are_told() -> None:
    x = torch.randn(4)
    forwards, backward, (_, _, e) = first_call(x)
    assert forwards.find(backward, (x, e.clone(), x)) is None
    run = forwards.find(backward, (x, e, x))
    assert run is not None
    x.add_(1.0)
    assert join(run, backward, (x, e, x)) == "an argument of the forward was overwritten since"


class Store:
    def __init__(self, kept: bytes | None) -> None:
        self.kept = kept

    def get(self, parts: dict[str, str]) -> bytes | None:
        return self.kept

    def put(self, parts: dict[str, str], data: bytes) -> None:
        self.kept = data


class Told(Keeper):
    def parts(self) -> dict[str, str]:
        return {}


def test_only_what_was_judged_right_is_known() -> None:
    class Kept:
        store = Store(None)

    keeper = Told(cast(Any, Kept), "backward", cast(Any, None), cast(Any, None), cast(Any, None))
    assert not keeper.is_known()
    Kept.store.kept = b"wrong"
    assert not keeper.is_known()
    keeper.remember()
    assert keeper.is_known()
