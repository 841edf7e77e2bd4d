# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From which outputs autograd comes to which inputs, and without which tangents a gradient is none."""

from __future__ import annotations

import torch
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

from retrograd.frontend.doors.reached_inputs import find_reached, tangents_of_gradients


def test_inputs_that_autograd_comes_to() -> None:
    w, b, x = (torch.randn(3, requires_grad=True) for _ in range(3))
    outputs = [(w * x).sum(), torch.sign(b), (w.detach() * x)[:0], torch.ones(1)]
    reached = find_reached(outputs, {"w": w, "b": b, 0: x, "unused": torch.zeros(1)})
    assert reached == {"w": {0}, "b": {1}, 0: {0, 2}, "unused": set()}
    assert find_reached(outputs[:1], {"w": w}) == {}


def test_inputs_that_are_no_leaves() -> None:
    x = torch.randn(3, requires_grad=True) * 2
    assert find_reached([x.sum(), x * 3, x.detach()], {0: x}) == {0: {0, 1}}


def test_gradients_with_terms_that_are_zeros() -> None:
    """Of two tangents and three gradients: of one tangent, of none, and of a sum that lost the other tangent."""
    aten, graph = torch.ops.aten, torch.fx.Graph()
    first, second = graph.placeholder("tangents_1"), graph.placeholder("tangents_2")
    for number, node in enumerate((first, second)):
        node.meta["desc"] = TangentAOTInput(PlainAOTOutput(number))
    zeros = graph.call_function(aten.full.default, ([3], 0))
    own = graph.call_function(aten.neg.default, (first,))
    added = graph.call_function(aten.add.Tensor, (zeros, own))
    graph.output((own, zeros, added, None))
    names = [ParamAOTInput("w"), PlainAOTInput(0), PlainAOTInput(1), PlainAOTInput(2)]
    found = tangents_of_gradients(
        torch.fx.GraphModule({}, graph),
        [GradAOTOutput(name) for name in names],
        0,
        {"w": frozenset((0, 1)), 0: frozenset((1,)), 1: frozenset((0, 1))},
    )
    assert [sorted(one) for one in found] == [["tangents_1"], ["tangents_2"], ["tangents_1", "tangents_2"], []]
