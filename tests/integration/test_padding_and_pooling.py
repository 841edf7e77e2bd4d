# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Padding and pooling: windows of minus infinities, and planes whose sizes are open."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

import retrograd

HEIGHT, WIDTH = Dim("height", min=4, max=64), Dim("width", min=4, max=64)


def check(step: Any, model: Callable[[Tensor], Any], x: Tensor) -> None:
    found, expected = (tuple(torch.utils._pytree.tree_leaves(call(x))) for call in (step, model))
    torch.testing.assert_close(found, expected)
    values = [[y for y in results if y.is_floating_point()] for results in (found, expected)]
    weights = [torch.randn_like(y) for y in values[0]]
    gradients = (torch.autograd.grad(results, x, weights) for results in values)
    torch.testing.assert_close(*gradients)


def pools(x: Tensor) -> list[Tensor]:
    """Maxima, with their places, of windows with padding, dilation, and one that goes beyond the plane."""
    plane = F.max_pool2d(x, 3, 1, 1, return_indices=True)
    dilated = F.max_pool2d(x, 4, 2, 2, 3, return_indices=True)
    beyond = F.max_pool2d(x[..., :4, :4], 3, 3, 1, ceil_mode=True, return_indices=True)
    line = F.max_pool1d(x.flatten(2), 5, 3, 2, return_indices=True)
    return [*plane, *dilated, *beyond, *line]


@pytest.mark.long
def test_windows_of_minus_infinities_and_padding() -> None:
    """The place of the maximum is the first element, as in eager; the padding has none."""
    x = torch.full((2, 1, 9, 9), -math.inf)
    x[1, 0, 3:5, ::2] = torch.randn(2, 5)
    x.requires_grad_()
    check(retrograd.compile_backward(pools, (x,), fallback="error"), pools, x)


def circular(x: Tensor) -> Tensor:
    return F.pad(x, (1, 2, 3, 1), mode="circular").square()


@pytest.mark.short_cases("adaptive")
@pytest.mark.parametrize("model", [circular, lambda x: F.adaptive_max_pool2d(x, 3)], ids=["circular", "adaptive"])
def test_open_planes(model: Callable[[Tensor], Tensor]) -> None:
    """Circular padding is compiled, adaptive pooling to a few runs in torch, where it is all that there is too."""
    x = torch.randn(2, 2, 8, 10, requires_grad=True)
    shapes = {"x": {2: HEIGHT, 3: WIDTH}}
    if model is circular:
        step = retrograd.compile_backward(model, (x,), dynamic_shapes=shapes, fallback="error")
    else:
        with pytest.warns(retrograd.EagerIslandWarning, match="aten.adaptive_max_pool2d"):
            step = retrograd.compile_backward(model, (x,), dynamic_shapes=shapes)
    for size in ((8, 10), (7, 5), (4, 4)):
        check(step, model, torch.randn(2, 2, *size, requires_grad=True))


def test_convolution_of_padded_open_planes() -> None:
    """Which iree-compile refuses: PyTorch runs the convolution."""
    torch.manual_seed(0)
    weight = torch.randn(3, 2, 3, 3)

    def model(x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), weight)

    x = torch.randn(2, 2, 8, 10, requires_grad=True)
    step = retrograd.compile_backward(model, (x,), dynamic_shapes={"x": {2: HEIGHT, 3: WIDTH}})
    for size in ((8, 10), (7, 5), (4, 4)):
        check(step, model, torch.randn(2, 2, *size, requires_grad=True))
