# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How tensors lie: what is contiguous in them, and that both ways give their values back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.frontend.autograd.steps.layouts import Expanded, Part, Permuted, find_layout


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of a dense tensor: permuted, sliced, selected from."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    view = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    for _ in range(draw(st.integers(0, 4))):
        axis = draw(st.integers(0, view.dim() - 1))
        match draw(st.sampled_from(["slice", "select", "permute", "expand"])):
            case "slice":
                view = view.narrow(axis, begin := draw(st.integers(0, view.shape[axis] - 1)), view.shape[axis] - begin)
            case "select" if view.dim() > 1:
                view = view.select(axis, draw(st.integers(0, view.shape[axis] - 1)))
            case "permute":
                view = view.permute(draw(st.permutations(range(view.dim()))))
            case "expand" if view.dim() < 5:
                view = view.unsqueeze(axis).expand(*view.shape[:axis], 2, *view.shape[axis:])
    return view


@settings(max_examples=300, deadline=None)
@given(views())
def test_the_base_is_contiguous_and_holds_the_tensor(view: torch.Tensor) -> None:
    layout = find_layout(view)
    if layout is None:
        return
    assert layout.base(view).is_contiguous()
    assert layout.base(view).untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    assert torch.equal(layout.view(layout.base(view)), view)
    # At a later step the tensor may lie otherwise.
    assert torch.equal(layout.view(layout.base(view.clone(memory_format=torch.contiguous_format))), view)


def test_transposed_and_taken_apart() -> None:
    x = torch.arange(24.0)
    assert find_layout(x.view(4, 6).t()) == Permuted((1, 0))
    keys = x.view(2, 3, 4)[:, 1]
    assert find_layout(keys) == Part((2, 12), (2, 4), (12, 1), 4)
    heads = x.view(2, 2, 3, 2, 1).permute(2, 0, 3, 1, 4)[1]
    assert isinstance(find_layout(heads), Part)
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert find_layout(channels_last) == Permuted((0, 2, 3, 1))


@pytest.mark.parametrize(
    "view",
    [
        torch.ones(3, 4),
        torch.ones(3, 1).expand(3, 4),
        torch.ones(0, 3).t(),
        torch.ones(2, 3, dtype=torch.complex64).t().conj(),
        # A small part of much memory.
        torch.ones(40, 40)[:, 7],
        # Elements that are read twice.
        torch.ones(10).as_strided((4, 3), (2, 1), 0),
    ],
)
def test_other_tensors_are_left_as_they_are(view: torch.Tensor) -> None:
    assert find_layout(view) is None


def test_what_repeats_memory() -> None:
    column = torch.randn(512, 1)
    wide = column.expand(512, 32)
    layout = find_layout(wide)
    assert layout == Expanded((512, 1), (512, 32))
    base = layout.base(wide)
    assert base.is_contiguous() and base.data_ptr() == column.data_ptr()
    assert torch.equal(layout.view(base), wide)
    # Neither a few numbers, nor parts that lie apart, nor what is read otherwise.
    assert find_layout(column[:4].expand(4, 32)) is None
    assert find_layout(torch.randn(512, 2)[:, :1].expand(512, 32)) is None
    assert find_layout(torch._neg_view(wide)) is None
