# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Islands written as Python: the same results in fewer calls of torch, and left as they are where that is not so."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.kept_model import KeptIsland, keep_islands
from retrograd.runtime.steps.island_code import shorten
from retrograd.runtime.steps.islands import EagerIsland, Layout


def heads(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values side by side, as views of views of one tensor."""
    all_three = x.view(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)
    q, k, v = (all_three[number] for number in range(3))
    out = F.softmax(q @ k.transpose(-1, -2) + mask, -1) @ v
    return out.permute(0, 2, 1, 3).reshape(10, 32), out.sum(-1)


def slices(x: Tensor, _mask: Tensor) -> tuple[Tensor, ...]:
    rows = x.view(10, 96)[2:9:3, 5:]
    return rows.unsqueeze(0).expand(4, -1, -1), rows.t() + 1, x.select(0, 3)


def convolved(x: Tensor, _mask: Tensor) -> tuple[Tensor, ...]:
    images = x.view(2, 5, 8, 12).permute(0, 3, 1, 2)
    return (F.conv2d(images, x[:3, :12].reshape(3, 12, 1, 1)).permute(0, 2, 3, 1),)


def strided(x: Tensor, _mask: Tensor) -> tuple[Tensor, ...]:
    """Begins where it says in memory, wherever the argument does: it is no view of the argument by its place alone."""
    return x.as_strided((3, 4), (96, 2), 0) + 1, x.sum(0)


def stacked(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return torch.stack([x[:5], x[5:]]), torch.cat([x, x * 2], 1), mask.exp()


def reinterpreted(x: Tensor, _mask: Tensor) -> tuple[Tensor, ...]:
    return x.view(torch.int32) + 1, x.view(torch.int32)[1:] * 2


CASES = [heads, slices, convolved, stacked, strided, reinterpreted]
Call = Callable[[Tensor, Tensor], Sequence[Tensor]]


def trace(call: Call, x: Tensor, mask: Tensor) -> GraphModule:
    module = make_fx(call)(x, mask)
    assert isinstance(module, GraphModule)
    return module


def count_views(graph: torch.fx.Graph) -> int:
    return sum(node.op == "call_function" and getattr(node.target, "is_view", False) for node in graph.nodes)


@pytest.mark.parametrize("call", CASES)
@pytest.mark.parametrize("begin", [0, 7])
def test_results_are_the_same(call: Call, begin: int) -> None:
    """Also where an argument begins elsewhere in its memory than the one that it was written for."""
    x, mask = torch.randn(10, 96), torch.randn(2, 1, 1, 5)
    short = shorten(trace(call, x, mask).graph, (x, mask))
    assert short is not None
    memory = torch.randn(1000)
    other = memory[begin : begin + 960].view(10, 96)
    for found, expected in zip(short(other, mask), call(other, mask), strict=True):
        assert found.shape == expected.shape and found.stride() == expected.stride() and torch.equal(found, expected)


def test_views_of_views_are_one_call() -> None:
    x, mask = torch.randn(10, 96), torch.randn(2, 1, 1, 5)
    module = trace(heads, x, mask)
    short = shorten(module.graph, (x, mask))
    assert short is not None and count_views(module.graph) > 6
    graph = short.__self__.graph  # type: ignore[attr-defined]
    names = [node.target for node in graph.nodes if node.op == "call_method"]
    assert names.count("as_strided") == 3 and count_views(graph) < count_views(module.graph) - 5


def test_a_graph_with_constants_of_its_own_is_left() -> None:
    weight = torch.randn(96)
    module = make_fx(lambda x: (x * weight,))(torch.randn(10, 96))
    assert any(node.op == "get_attr" for node in module.graph.nodes)
    assert shorten(module.graph, (torch.randn(10, 96),)) is None


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("call", [heads, convolved])
def test_islands_are_written_at_their_third_call(call: Call, kept: bool) -> None:
    x, mask = torch.randn(10, 96), torch.randn(2, 1, 1, 5)
    layouts = [Layout.of(x), Layout.of(mask)]
    island = EagerIsland(trace(call, x, mask), layouts, "ops", is_library=True, by_values=True)
    if kept:
        (entry,) = keep_islands([island]) or ()
        assert isinstance(entry, KeptIsland)
        island = entry.open()
    for number in range(5):
        x = torch.randn(10, 96)
        assert (island._run is not None) == (number > 2)
        for found, expected in zip(island([x, mask]), call(x, mask), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if len(call(x, mask)) > 1:
        return
    # Inside of a transform an island runs as it is.
    many = torch.randn(3, 10, 96)
    batched = torch.func.vmap(lambda x: tuple(island.function(x, mask)))(many)
    torch.testing.assert_close(torch.func.vmap(lambda x: tuple(island._compute([x, mask])))(many), batched)
