# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The generator: published vectors, its distribution, and one seed for a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.decompositions.table import decomposition_table
from retrograd.frontend.layers.random_ops import DRAW_SEED, UNIFORM, draw_part, draw_seed, find_seed, philox, uniform
from retrograd.frontend.layers.streams import share_seed
from retrograd.frontend.python.source_locations import CaptureError

# Random123's kat_vectors: counter, key, result of philox4x32 with 7 rounds.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def words(text: str) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_published_vectors(counter: str, key: str, result: str) -> None:
    assert [int(w) for w in philox(words(counter), words(key))] == [int(w) for w in words(result)]


def signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def test_what_makes_counter_and_key() -> None:
    seed = torch.tensor([signed(0x299F31D0A4093822), signed(0x0370734413198A2E)])
    drawn = philox(words("00000001 00000009 13198a2e 03707344"), words("a4093822 299f31d0"))
    assert uniform(seed, 9, (3, 4))[1].tolist() == [(int(word) >> 8) / 2**24 for word in drawn]
    assert float(uniform(torch.tensor([0, 0]), 0, ())) == 0x5F6FB7 / 2**24


@pytest.mark.parametrize(("first", "count"), [(0, 9), (1, 2), (3, 6), (4, 0), (6, 1)])
def test_a_part_has_the_numbers_of_the_whole(first: int, count: int) -> None:
    seed = torch.tensor([3, -4])
    assert torch.equal(draw_part(seed, 2, first, count), uniform(seed, 2, (9,))[first : first + count])


def test_shape_changes_no_number() -> None:
    seed = torch.tensor([3, -4])
    assert torch.equal(uniform(seed, 1, (4, 6)).flatten(), uniform(seed, 1, (24,)))
    assert uniform(seed, 1, (0, 3)).shape == (0, 3)


def test_distribution() -> None:
    count, bins = 1 << 18, 256
    numbers = uniform(torch.tensor([11, 12]), 0, (count,)).double()
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    # Five standard errors each.
    assert abs(float(numbers.mean()) - 0.5) < 5 * (1 / 12 / count) ** 0.5
    assert abs(float(numbers.var()) - 1 / 12) < 5 * (1 / 180 / count) ** 0.5
    expected = count / bins
    chi_square = float(((torch.histc(numbers, bins, 0, 1) - expected) ** 2 / expected).sum())
    assert abs(chi_square - (bins - 1)) < 5 * (2 * (bins - 1)) ** 0.5


@pytest.mark.parametrize(("seed", "stream"), [(12, 1), (13, 0)], ids=["another stream", "another seed"])
def test_streams_and_seeds_are_independent(seed: int, stream: int) -> None:
    numbers, other = (
        uniform(torch.tensor([11, 12]), 0, (1 << 16,)),
        uniform(torch.tensor([11, seed]), stream, (1 << 16,)),
    )
    for a, b in ((numbers, other), (numbers[1:], other[:-1]), (numbers[1:], numbers[:-1])):
        correlation = float(torch.corrcoef(torch.stack([a, b]))[0, 1])
        assert abs(correlation) < 5 / len(a) ** 0.5


def test_seed_follows_the_default_generator() -> None:
    torch.manual_seed(5)
    first, second = draw_seed(), draw_seed()
    torch.manual_seed(5)
    assert torch.equal(torch.ops.retrograd.draw_seed(), first)
    assert not torch.equal(first, second)
    assert first.dtype is torch.int64 and first.shape == (2,)


def graph_of(backward: bool = False) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    results: list[Any] = []
    for _ in range(3):
        y = graph.call_function(torch.ops.aten.neg.default, (x,))
        seed = graph.call_function(DRAW_SEED)
        numbers = graph.call_function(UNIFORM, (seed, 0, [4]))
        results.append(graph.call_function(torch.ops.aten.add.Tensor, (y, numbers)))
    if backward:
        numbers.meta["partitioner_tag"] = "is_backward"
        numbers.stack_trace = 'File "model.py", line 3, in forward\n    dropout(x)'
    graph.output(tuple(results))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def test_share_seed() -> None:
    graph_module = graph_of()
    share_seed(graph_module)
    nodes = list(graph_module.graph.nodes)
    assert nodes[1] is find_seed(graph_module.graph)
    assert len([n for n in nodes if n.target is DRAW_SEED]) == 1
    assert [n.args for n in nodes if n.target is UNIFORM] == [(nodes[1], stream, [4]) for stream in range(3)]
    torch.manual_seed(2)
    found = graph_module(torch.zeros(4))
    torch.manual_seed(2)
    seed = draw_seed()
    assert all(torch.equal(t, uniform(seed, stream, (4,))) for stream, t in enumerate(found))


def test_share_seed_leaves_other_graphs_alone() -> None:
    graph_module = torch.fx.symbolic_trace(lambda x: x + 1)
    before = graph_module.code
    share_seed(graph_module)
    assert graph_module.code == before
    assert find_seed(graph_module.graph) is None


def test_random_backward_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"backward draws random numbers, at File \"model.py\", line 3"):
        share_seed(graph_of(backward=True))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.nn.functional.dropout(x, 0.5),
        lambda x: torch.bernoulli(x),
        lambda x: torch.rand_like(x, dtype=torch.float64),
        lambda x: torch.randn(3, device=x.device),
        lambda x: torch.randint(0, 4, (3,), device=x.device),
        lambda x: torch.normal(0.0, 1.0, (3,), device=x.device),
    ],
)
def test_numbers_are_on_the_device_that_eager_draws_them_on(call: Callable[[Tensor], Tensor]) -> None:
    """Whatever the device, they are a function of a seed that the CPU draws. A fake tensor needs no GPU."""
    with FakeTensorMode():
        x = torch.empty(3, device="cuda")
        graph_module = make_fx(call, decomposition_table=decomposition_table())(x)
    assert graph_module.graph.find_nodes(op="call_function", target=DRAW_SEED)
    (output,) = graph_module.graph.find_nodes(op="output")
    assert output.args[0].meta["val"].device.type == "cuda"
