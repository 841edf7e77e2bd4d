# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Maxima of windows over images with channels last, as PyTorch runs their ops: against its own pool."""

import math

import pytest
import torch
from torch import Tensor

from retrograd.frontend.decompositions.convolutions.windows import Window
from retrograd.frontend.layers.pool_ops import (
    MAX_POOL_LAST,
    MAX_POOL_LAST_BACKWARD,
    can_number_taps,
    find_places,
    write_window,
)

aten = torch.ops.aten
WINDOWS = {
    "of a ResNet": (Window((3, 3), (2, 2), (1, 1), (1, 1)), False),
    "apart": (Window((2, 2), (2, 2), (0, 0), (1, 1)), False),
    "with gaps": (Window((2, 2), (3, 3), (0, 0), (1, 1)), False),
    "dilated": (Window((3, 2), (1, 2), (1, 0), (2, 1)), False),
    "over the end": (Window((3, 3), (2, 2), (0, 1), (1, 1)), True),
}


def images(kind: str) -> Tensor:
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    if kind == "ties":
        return x.round()
    if kind == "no numbers":
        x[x > 1] = math.nan
    if kind == "infinities":
        x[:, :2] = -math.inf
    return x


@pytest.mark.parametrize("kind", ["numbers", "ties", "no numbers", "infinities"])
@pytest.mark.parametrize("name", WINDOWS)
def test_maxima_places_and_gradients_are_pytorchs(name: str, kind: str) -> None:
    window, is_ceil = WINDOWS[name]
    x = images(kind)
    shape = [[*window.kernel], [*window.stride], [*window.padding], [*window.dilation], is_ceil]
    most, places = aten.max_pool2d_with_indices(x, *shape)
    numbers = write_window(window)
    found, taps = MAX_POOL_LAST(x.permute(0, 2, 3, 1).contiguous(), numbers, most.shape[2:])
    torch.testing.assert_close(found.permute(0, 3, 1, 2), most, equal_nan=True)
    assert taps.dtype == torch.int8
    assert torch.equal(find_places(taps, numbers, x.shape[2:]).permute(0, 3, 1, 2), places)
    grad = torch.randn_like(most)
    expected = aten.max_pool2d_with_indices_backward(grad, x, *shape, places)
    ours = MAX_POOL_LAST_BACKWARD(grad.permute(0, 2, 3, 1).contiguous(), taps, numbers, x.shape[2:])
    torch.testing.assert_close(ours.permute(0, 3, 1, 2), expected)


def test_taps_are_numbered_in_a_byte() -> None:
    assert can_number_taps((11, 11)) and not can_number_taps((12, 11))
