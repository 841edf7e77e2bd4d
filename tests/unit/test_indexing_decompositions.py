# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decompositions of what reads and writes by index, cuts, pads and rolls, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decomposition_checks import assert_close, check, trace, traced
from torch import Tensor

from retrograd.frontend.python.source_locations import CaptureError

aten = torch.ops.aten


def test_pieces_that_are_said_to_be_written_to() -> None:
    """What a recurrent cell splits its gates with."""
    x = torch.randn(3, 5)
    check(aten.unsafe_split.Tensor, x, 2, 1)
    check(aten.unsafe_split_with_sizes.default, x, [2, 0, 3], -1)


@pytest.mark.parametrize("place", [torch.tensor(2), torch.tensor([2])])
def test_index_add_of_a_place_with_axes_and_without(place: Tensor) -> None:
    check(aten.index_add.default, torch.randn(4, 5), 0, place, torch.randn(1, 5))
    check(aten.index_add.default, torch.randn(4, 5), -1, place, torch.randn(4, 1), alpha=3)
    check(aten.index_add.default, torch.randn(4), 0, place, torch.randn(1))


@pytest.mark.parametrize("op", [aten.index_put.default, aten._unsafe_index_put.default])
@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put_with_axes_left_out(op: Any, accumulate: bool) -> None:
    x = torch.randn(4, 5, 6)
    i = torch.tensor([0, 2, 2]) if accumulate else torch.tensor([0, 2, 1])
    j = torch.tensor([[1], [3]])
    put = {aten.index_put.default, aten._unsafe_index_put.default}

    def agree(indices: list[Tensor | None], values: Tensor) -> None:
        ours = traced(op, x, indices, values, accumulate, gone=op is not aten.index_put.default)
        assert_close(ours, aten.index_put.default(x, indices, values, accumulate))

    assert op in put
    agree([None, i], torch.randn(4, 3, 6))
    agree([None, None, i], torch.randn(4, 5, 3))
    agree([i, None, j], torch.randn(2, 3, 5))
    agree([None, i, j], torch.randn(4, 2, 3))
    agree([None, i], torch.randn(1))


@pytest.mark.parametrize("op", [aten.index.Tensor, aten.index_put.default])
def test_indices_are_of_one_type(op: Any) -> None:
    x, indices = torch.randn(4, 5), [torch.tensor([0, -1], dtype=torch.int32), torch.tensor([1, 3])]
    values = (torch.randn(2), False) if op is aten.index_put.default else ()
    check(op, x, indices, *values, gone=False)
    (node,) = [n for n in trace(op, x, indices, *values)[0].graph.nodes if n.target is op]
    assert {i.meta["val"].dtype for i in node.args[1]} == {torch.int64}


def test_writing_nowhere() -> None:
    check(aten.index_put.default, torch.randn(4, 5), [torch.zeros(0, dtype=torch.int64)], torch.randn(0, 5), True)


@pytest.mark.parametrize(
    ("shape", "index"), [((3, 3), [4, -9, 0]), ((3, 3), 4), ((), 0), ((1,), []), ((2, 3), [[5], [1]])]
)
def test_take(shape: tuple[int, ...], index: Any) -> None:
    check(aten.take.default, torch.randn(shape), torch.tensor(index, dtype=torch.int64))


@pytest.mark.parametrize(
    ("shifts", "dims", "gone"), [([1, 2], [2, 0], False), ([3, 1], [2, -1], True), ([1], [2], True), ([4], [-1], True)]
)
def test_roll_of_two(shifts: list[int], dims: list[int], gone: bool) -> None:
    check(aten.roll.default, torch.randn(5, 6, 2), shifts, dims, gone=gone)


@pytest.mark.parametrize("shape", [(5, 6), (2,), (2, 1), ()])
def test_roll_without_an_axis(shape: tuple[int, ...]) -> None:
    """Becomes one along the only axis there is."""
    x = torch.randn(shape)
    graph, tensors = trace(aten.roll.default, x, [3])
    assert all(n.args[2] == [0] for n in graph.graph.nodes if n.target is aten.roll.default)
    assert_close(graph(*tensors), x.roll(3))


def test_index_put_keeps_leading_indices() -> None:
    x = torch.randn(4, 5)
    check(aten.index_put.default, x, [torch.tensor([1, 3])], torch.randn(2, 5), False, gone=False)


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put_by_a_mask(accumulate: bool) -> None:
    """A row for all that are chosen, and one for each; nothing is written anywhere else."""
    x, mask = torch.randn(4, 5), torch.tensor([False, True, False, True])
    for values in (torch.randn(5), torch.randn(2, 5), torch.randn(2, 1), torch.randn(())):
        check(aten.index_put.default, x, [mask], values, accumulate)
    check(aten.index_put.default, x, [mask.to(torch.uint8)], torch.randn(5), accumulate)
    check(aten.index_put.default, x.T, [None, mask], torch.randn(5, 2), accumulate)
    with pytest.raises(CaptureError, match="by a mask and other indices at once"):
        trace(aten.index_put.default, x, [mask, torch.tensor([1])], torch.zeros(()))


@pytest.mark.parametrize("pad", [[-1, 2], [-1, -2, 3, -1], [0, -1], [-1, 0, -2, -1]])
def test_negative_pad(pad: list[int]) -> None:
    x = torch.randn(5, 7)
    only_cuts = all(amount <= 0 for amount in pad)
    check(aten.constant_pad_nd.default, x, pad, 1.5, gone=only_cuts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [-2, 0, 1])
@pytest.mark.parametrize("dims", [(0, 1), (2, 1), (-3, -1)])
def test_diagonal(dtype: torch.dtype, offset: int, dims: tuple[int, int]) -> None:
    x = torch.randn(3, 5, 4).to(dtype)
    src = torch.diagonal(torch.randn(3, 5, 4).to(dtype), offset, *dims).contiguous()
    check(aten.diagonal_scatter.default, x, src, offset, *dims)
    check(aten.diagonal_backward.default, src, [3, 5, 4], offset, *dims)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("padding_idx", [-1, 3])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_embedding_backward(dtype: torch.dtype, padding_idx: int, by_frequency: bool) -> None:
    indices = torch.randint(0, 7, (4, 6))
    grad = torch.randn(4, 6, 5).to(dtype)
    check(aten.embedding_dense_backward.default, grad, indices, 9, padding_idx, by_frequency)


def summed(x: Tensor, index: Tensor, src: Tensor) -> Tensor:
    """The sum of ``src`` over the edges that end at each row, as a network on a graph writes it."""
    return x.scatter_add(0, index.unsqueeze(-1).expand_as(src), src)


def spread(x: Tensor, index: Tensor) -> Tensor:
    """The middle axis of ``x`` at the places of an index that is expanded over the others."""
    return x.gather(1, index.view(1, -1, 1).expand(x.shape[0], -1, x.shape[2]))


def written(x: Tensor, index: Tensor, src: Tensor) -> Tensor:
    """The middle axis of ``x`` with ``src`` at the places of such an index."""
    return x.scatter(1, index.view(1, -1, 1).expand_as(src), src)


def count_places(op: Any, *args: Any) -> list[int]:
    """How many numbers name the place of each element that ``op`` writes or reads one by one."""
    graph = trace(op, *args)[0].graph
    puts = graph.find_nodes(op="call_function", target=aten.index_put.default)
    gathers = graph.find_nodes(op="call_function", target=aten.gather.default)
    return [*(len(node.args[1]) for node in puts), *(node.args[0].meta["val"].dim() for node in gathers)]


def test_an_index_of_whole_rows() -> None:
    places = torch.tensor([2, 0, 2, 3])
    check(summed, torch.randn(5, 3), places, torch.randn(4, 3))
    assert count_places(summed, torch.randn(5, 3), places, torch.randn(4, 3)) == [1]
    check(spread, torch.randn(2, 5, 3), places)
    assert count_places(spread, torch.randn(2, 5, 3), places) == []
    check(written, torch.randn(2, 5, 3), torch.tensor([3, 0]), torch.randn(2, 2, 3))


def test_an_index_of_parts_of_rows() -> None:
    """Neither of fewer elements than a row has, nor an argument, which is expanded at this call alone."""
    places = torch.tensor([2, 0, 2, 3])
    narrow = torch.randn(4, 2)
    check(summed, torch.randn(5, 3), places, narrow)
    assert count_places(summed, torch.randn(5, 3), places, narrow) == [2]
    index, src = places.unsqueeze(-1).expand(4, 3), torch.randn(4, 3)
    assert count_places(aten.scatter_add.default, torch.randn(5, 3), 0, index, src) == [2]
    assert count_places(aten.gather.default, torch.randn(5, 3), 0, index) == [2]
