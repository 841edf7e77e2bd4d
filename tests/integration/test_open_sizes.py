# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ops whose forms go by sizes, compiled for open ones: values and gradients are eager's at each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

import retrograd

A, B = Dim("a", max=32), Dim("b", max=32)
HEIGHT, WIDTH = Dim("height", min=6, max=40), Dim("width", min=6, max=40)


def step_of(model: Callable[..., Tensor], args: Sequence[Tensor]) -> list[Tensor]:
    """The output of a step and the gradients of the arguments that are floats."""
    given = [a.detach().requires_grad_() if a.is_floating_point() else a for a in args]
    y = model(*given)
    y.backward(torch.cos(torch.arange(y.numel(), dtype=torch.float32)).reshape(y.shape).to(y.dtype))
    return [y.detach(), *(a.grad for a in given if a.grad is not None)]


def check(model: Callable[..., Tensor], shapes: Any, *calls: Sequence[Tensor]) -> None:
    example = [a.detach().requires_grad_() if a.is_floating_point() else a for a in calls[0]]
    step = retrograd.compile_backward(model, example, dynamic_shapes=shapes)
    for args in calls:
        ours, theirs = step_of(step, args), step_of(model, args)
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


PLACES = (torch.tensor([[5, 0]]), torch.tensor([[-1, 0, 3], [1, 1, -6]]))


@pytest.mark.long_cases("read", "second axis")
@pytest.mark.parametrize(
    "model",
    [
        lambda x, i: x[i],
        lambda x, i: x[:, i % 5],
        lambda x, i: torch.zeros(6, 5).index_put((i,), x[0], accumulate=True),
    ],
    ids=["read", "second axis", "written"],
)
def test_places_of_two_open_axes(model: Callable[..., Tensor]) -> None:
    """torch-mlir's index_put takes but one of them."""
    x = torch.randn(6, 5)
    check(model, (None, {0: A, 1: B}), *((x, places) for places in PLACES))


def test_places_that_broadcast() -> None:
    def model(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return x[i[:, None], j]

    x = torch.randn(6, 5)
    calls = [(torch.tensor([5, 0]), torch.tensor([1, 2, 3])), (torch.tensor([-6, 0, 3]), torch.tensor([1]))]
    check(model, (None, {0: A}, {0: B}), *((x, *places) for places in calls))


@pytest.mark.short_cases("True-False", "False-True")
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("include_pad", [False, True])
def test_average_pools_of_open_planes(ceil_mode: bool, include_pad: bool) -> None:
    def model(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, 2, 1, ceil_mode, include_pad)

    sizes = [(10, 11), (13, 8), (7, 7), (6, 16)]
    check(model, ({2: HEIGHT, 3: WIDTH},), *((torch.randn(2, 3, *size),) for size in sizes))


@pytest.mark.long
def test_maximum_pools_of_open_planes() -> None:
    def model(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 2, 2, 1, dilation=3, ceil_mode=True)

    sizes = [(10, 11), (13, 8), (7, 7), (6, 16)]
    check(model, ({2: HEIGHT, 3: WIDTH},), *((torch.randn(2, 3, *size),) for size in sizes))


@pytest.mark.short_cases("reflect", "constant")
@pytest.mark.parametrize("mode", ["reflect", "replicate", "constant"])
def test_padding_of_open_planes(mode: str) -> None:
    def model(x: Tensor) -> Tensor:
        return F.pad(x, (2, 1, 1, 2), mode=mode)

    check(model, ({2: HEIGHT, 3: WIDTH},), (torch.randn(2, 3, 7, 8),), (torch.randn(2, 3, 9, 6),))
