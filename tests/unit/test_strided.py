# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Views by sizes and strides as slices: the same elements as PyTorch's, on random views of random layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.decompositions.views.strided import (
    Window,
    as_strided,
    as_strided_scatter,
    find_place,
    find_window,
    is_outside,
    is_overlapping,
)
from retrograd.frontend.python.source_locations import CaptureError

Geometry = tuple[torch.Tensor, list[int], list[int], int]


@st.composite
def views(draw: st.DrawFn) -> Geometry:
    """A dense tensor of some layout, and sizes, strides and offset of a view in its memory."""
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    order = draw(st.permutations(range(len(shape))))
    x = torch.arange(torch.Size(shape).numel()).reshape(shape).permute(order)
    if draw(st.booleans()):
        size = draw(st.lists(st.integers(1, 3), max_size=3))
        stride = draw(st.lists(st.integers(0, 5), min_size=len(size), max_size=len(size)))
        return x, size, stride, draw(st.integers(0, 3))
    view = x
    for _ in range(draw(st.integers(0, 3)) if x.dim() else 0):
        axis = draw(st.integers(0, view.dim() - 1))
        start = draw(st.integers(0, view.shape[axis] - 1))
        match draw(st.sampled_from(["slice", "unsqueeze", "permute"])):
            case "slice":
                view = view[(slice(None),) * axis + (slice(start, None, draw(st.integers(1, 2))),)]
            case "unsqueeze":
                view = view.unsqueeze(axis)
            case _:
                view = view.permute(draw(st.permutations(range(view.dim()))))
    return x, list(view.shape), list(view.stride()), int(view.storage_offset())


@given(views())
@settings(max_examples=300, deadline=None)
def test_the_same_elements_as_pytorchs(view: Geometry) -> None:
    x, size, stride, offset = view
    place = find_place(x, size, stride, offset)
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    assert (place is None) == (last >= x.numel())
    if place is None:
        return
    expected = x.as_strided(size, stride, offset)
    assert torch.equal(as_strided(x, size, stride, offset), expected)
    src = -1 - torch.arange(expected.numel()).reshape(size)
    seen = x.as_strided(size, stride, offset).flatten().tolist()
    if is_overlapping(size, stride):
        assert place.window is not None or as_strided_scatter(x, src, size, stride, offset) is NotImplemented
    else:
        assert len(set(seen)) == len(seen)
    if place.window is None and is_overlapping(size, stride):
        return
    written = x.clone(memory_format=torch.preserve_format)
    written.as_strided(size, stride, offset).copy_(src)
    assert torch.equal(as_strided_scatter(x, src, size, stride, offset), written)


@pytest.mark.parametrize(
    ("size", "stride", "offset", "window"),
    [
        ((2, 3), (4, 1), 5, Window((1, 1), (2, 3), (1, 1), (0, 1))),
        ((2, 2), (2, 4), 4, Window((1, 0), (2, 2), (1, 2), (1, 0))),
        ((3,), (4,), 2, Window((0, 2), (3, 1), (1, 1), (0,))),
        ((1, 4), (9, 1), 8, Window((2, 0), (1, 4), (1, 1), (1,))),
        ((6,), (1,), 0, None),
        ((2, 2), (0, 1), 0, None),
    ],
    ids=["block", "turned, every other", "column", "row", "across rows", "twice the same"],
)
def test_windows_of_three_rows_of_four(
    size: tuple[int, ...], stride: tuple[int, ...], offset: int, window: Window | None
) -> None:
    assert find_window((3, 4), size, stride, offset) == window


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.as_strided((x.shape[0], 2), (12, 1), 1),
        lambda x: x.as_strided((x.shape[0], 3, 2), (12, 4, 2), 0),
        lambda x: x.as_strided((4, 3, x.shape[0]), (1, 4, 12), 0),
        lambda x: x.as_strided((x.shape[0] * 3, 4), (4, 1), 0),
        lambda x: x.as_strided((x.shape[0] * 12,), (1,), 0),
        lambda x: x.permute(1, 0, 2).as_strided((x.shape[0], 3), (12, 4), 2),
    ],
    ids=["columns", "every other", "turned", "rows joined", "a row", "of a turned tensor"],
)
def test_open_sizes(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A window is one for all sizes, or it is left alone; and no size is asked for."""

    def run(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = rows[:, None, None] * 12 + torch.arange(12).reshape(3, 4)
        seen = view(x)
        return seen * 1, torch.as_strided_scatter(x, seen * 2, seen.size(), seen.stride(), seen.storage_offset())

    table: Mapping[Any, Callable[..., Any]] = {
        torch.ops.aten.as_strided.default: as_strided,
        torch.ops.aten.as_strided_scatter.default: as_strided_scatter,
    }
    graph = make_fx(run, table, tracing_mode="symbolic")(torch.arange(5))
    assert "strided" not in graph.code and graph.shape_env is not None and not graph.shape_env.guards
    for count in (2, 5, 7):
        assert all(map(torch.equal, graph(torch.arange(count)), run(torch.arange(count))))


def test_open_sizes_of_which_there_is_no_telling() -> None:
    """Whether the last row that is taken is there depends on the sizes."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((x.shape[0], 2), (x.shape[1] + 1, 1), 1) * 1

    table: Mapping[Any, Callable[..., Any]] = {torch.ops.aten.as_strided.default: as_strided}
    graph = make_fx(run, table, tracing_mode="symbolic")(torch.ones(3, 8))
    assert "as_strided" in graph.code


def test_memory_of_another_tensor() -> None:
    """Gaps are the tensor's own, what is before and behind is not."""
    x = torch.arange(24).reshape(4, 6)[1:3, ::2]
    assert is_outside(x, [2], [1], 5)
    assert is_outside(x, [2], [6], 12)
    assert not is_outside(x, [2, 3], [6, 1], 6)
    assert not is_outside(x, [0], [1], 40)
    with pytest.raises(CaptureError, match=r"not its tensor's own(.|\n)*pass the tensor that it is a view of"):
        as_strided(x, [2], [1], 0)
