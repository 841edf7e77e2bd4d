# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Cross entropy in a traced graph, before and after: the same values, and nothing gathered from or summed over that is
written for it alone; nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from retrograd.frontend.decompositions.table import decomposition_table
from retrograd.frontend.layers.class_losses import shorten_class_losses

aten = torch.ops.aten
TOKENS, WIDTH, CLASSES = 6, 4, 5
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def traced(function: Function) -> tuple[GraphModule, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(TOKENS, WIDTH), torch.randn(CLASSES, WIDTH), torch.randn(CLASSES)
    args = (x, weight, bias, torch.tensor([0, 4, -100, 2, 2, 1]))
    # Nodes know the op that they are a part of, as in AOTAutograd's traces.
    with preserve_node_meta():
        return make_fx(function, decomposition_table=decomposition_table(), tracing_mode="fake")(*args), args


def gradients(loss: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """The loss of linear scores, and its gradients."""

    def run(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Any:
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        with torch.enable_grad():
            value = loss(F.linear(*leaves), target)
        return value, *torch.autograd.grad(value, leaves)

    return run


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "sum": lambda y, t: F.cross_entropy(y, t, reduction="sum"),
    "none": lambda y, t: (F.cross_entropy(y, t, reduction="none") * torch.arange(6.0)).sum(),
    "another ignored": lambda y, t: F.cross_entropy(y, t.clamp(0), ignore_index=2),
    "cast": lambda y, t: F.cross_entropy(y.bfloat16().float(), t),
    "sequences": lambda y, t: F.cross_entropy(y.view(2, 3, CLASSES).view(-1, CLASSES), t),
    "probabilities": lambda y, t: F.nll_loss(torch.log(y.softmax(-1) + 0.1), t),
    "smooth": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1),
    "weighted": lambda y, t: F.cross_entropy(y, t, torch.arange(1.0, 6.0)),
    "batched": lambda y, t: F.cross_entropy(y.view(2, 3, CLASSES).transpose(1, 2), t.view(2, 3)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_same_values(name: str) -> None:
    graph, args = traced(gradients(LOSSES[name]))
    before = graph(*args)
    shorten_class_losses(graph)
    graph.graph.lint()
    torch.testing.assert_close(graph(*args), before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["mean", "sum", "none", "another ignored", "cast", "sequences"])
def test_nothing_is_written_for_one_element_of_a_row(name: str) -> None:
    graph, _ = traced(gradients(LOSSES[name]))
    shorten_class_losses(graph)
    (gather,) = graph.graph.find_nodes(op="call_function", target=aten.gather.default)
    # The scores themselves, before their bias; rounded, they are what the product's kernel writes.
    wanted = torch.ops.prims.convert_element_type.default if name == "cast" else aten.mm.default
    assert gather.args[0].target is wanted
    # Those over classes are that of the exponentials.
    sums = graph.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert [node.args[0].target for node in sums if node.args[1] == [1]] == [aten.exp.default]


def test_weights_of_classes_are_summed_over() -> None:
    graph, _ = traced(gradients(LOSSES["weighted"]))
    shorten_class_losses(graph)
    sums = graph.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert aten.where.self in [node.args[0].target for node in sums]


def test_what_chooses_a_part_of_the_rows_stays() -> None:
    """An index that has fewer rows than what it chooses from."""

    def run(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
        return (x - bias[:4]).gather(1, target[2:4, None].clamp(0))

    graph, args = traced(run)
    before = graph(*args)
    nodes = [node.name for node in graph.graph.nodes]
    shorten_class_losses(graph)
    assert [node.name for node in graph.graph.nodes] == nodes
    torch.testing.assert_close(graph(*args), before)
