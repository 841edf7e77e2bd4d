# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Convolutions that take and give images with channels last: which do, and what is computed on permuted tensors."""

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from retrograd.frontend.doors.capture import capture_joint
from retrograd.frontend.libraries.channels_last import Turns
from retrograd.frontend.libraries.joined_layers import WITH
from retrograd.frontend.libraries.ops import LIBRARY, POOLS, Libraries, library_ops
from retrograd.frontend.libraries.permutations import inverse, is_view

aten = torch.ops.aten
LAST = Libraries(cpu=1 << 10, channels_last=True)


class Net(nn.Module):
    """Two convolutions of images [2, 3, 9, 7], with something in between."""

    def __init__(self, between: Callable[[Tensor], Tensor] = F.relu, channels: int = 3) -> None:
        super().__init__()
        self.first, self.norm, self.between = nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), between
        self.second = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.between(self.norm(self.first(x))))
        return y.square().mean((0, 2, 3))


def capture(model: nn.Module, libraries: Libraries = LAST) -> GraphModule:
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64, requires_grad=True)
    with contextlib.ExitStack() as stack, library_ops(libraries):
        return capture_joint(stack, model.double(), (x,)).graph_module


def find_copies(graph_module: GraphModule) -> list[Node]:
    """Permutations in compiled code of images with 8 channels, which are copies."""
    permuted = graph_module.graph.find_nodes(op="call_function", target=aten.permute.default)
    return [
        n
        for n in permuted
        if WITH not in n.meta
        and n.meta["val"].dim() == 4
        and n.meta["val"].shape[0] == 2
        and 8 in n.meta["val"].shape[1::2]
    ]


def make(like: Tensor) -> Tensor:
    """A tensor with the shape and type of a traced one."""
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    return torch.randn(like.shape, dtype=like.dtype)


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gate": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "joined": lambda x: torch.cat([x[:, :3], 2 * x[:, 3:]], 1),
    "padded": lambda x: F.pad(x, (1, 0, 0, 2), value=1.0),
    "maximum": lambda x: F.max_pool2d(x, 3, 2, 1),
    "numbers": lambda x: torch.where(x > 0, x, torch.full_like(x, 0.5)),
    "place": lambda x: x + torch.arange(7.0, dtype=x.dtype) * x.amax(1, keepdim=True),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_nothing_between_two_convolutions_is_turned_around(name: str) -> None:
    """And the graph computes what it computed."""
    model = Net(BETWEEN[name])
    turned, plain = capture(model), capture(model, Libraries())
    assert any(LIBRARY in node.meta for node in turned.graph.nodes)
    assert find_copies(turned) == []
    given = [make(node.meta["val"]) for node in plain.graph.find_nodes(op="placeholder")]
    found, expected = (Interpreter(graph).run(*given) for graph in (turned, plain))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_what_is_computed_on_planes_is_turned_around_there() -> None:
    """A sum along rows, and its gradient: their images are turned around before and behind, and no others."""
    many = [layer for _ in range(3) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
    graph = capture(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *many, Net(lambda x: x.cumsum(3), 8)))
    # What two convolutions read is one permutation when equal ops have been joined.
    assert len({node.args[0] for node in find_copies(graph)}) == 4


def test_it_has_to_pay() -> None:
    """Where more than half of what a library would turn around is left to compiled code, it stays."""
    assert Turns(spared=10, left=5).pay and not Turns(spared=10, left=6).pay
    graph = capture(Net(lambda x: x.cumsum(3).cumsum(2).flip(3)))
    laid = [n for n in graph.graph.nodes if n.target is aten.convolution.default]
    assert len(laid) == 2 and all(n.args[0].meta.get(WITH) is None for n in laid)


def test_pools_on_planes_are_decomposed() -> None:
    """Those that were kept whole, in case that their images lie with channels last."""
    graph = capture(nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)), LAST)
    assert not [n for n in graph.graph.nodes if n.target is aten.max_pool2d_with_indices_backward.default]
    assert set(POOLS) == {aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default}


def test_orders() -> None:
    assert inverse((0, 2, 3, 1)) == (0, 3, 1, 2)
    assert is_view([2, 1, 1, 8], (0, 2, 3, 1)) and is_view([1, 4, 5, 1], (0, 2, 3, 1))
    assert not is_view([2, 4, 1, 8], (0, 2, 3, 1))
