# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Backwards under ``enable()`` whose nodes ask what was saved, or resize by other than whole numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import retrograd

IDENTITY = torch.eye(4)


def solved(w: Tensor) -> Tensor:
    """The gradient with respect to the matrix is all that there is."""
    loss: Tensor = torch.linalg.solve(w + 4 * IDENTITY, torch.arange(8.0).view(4, 2)).sum()
    return loss


def solved_for_both(w: Tensor) -> Tensor:
    """Cayley's map, which orthogonal weights are parametrized by: a gradient for each side."""
    skew = w.tril(-1) - w.tril(-1).mT
    rotation = torch.linalg.solve(IDENTITY + skew, IDENTITY - skew)
    loss: Tensor = (rotation * torch.arange(16.0).view(4, 4)).sum()
    return loss


def solved_for_one(w: Tensor) -> Tensor:
    """Only the right-hand side has a gradient."""
    loss: Tensor = (torch.linalg.solve(torch.arange(16.0).view(4, 4).cos() + 4 * IDENTITY, w) ** 2).sum()
    return loss


def resized(w: Tensor) -> Tensor:
    return (F.interpolate(w[None, None], size=(7, 9), mode="nearest") * torch.arange(63.0).view(7, 9)).sum()


def resized_exactly(w: Tensor) -> Tensor:
    return (F.interpolate(w[None, None], size=(7, 3), mode="nearest-exact") * torch.arange(21.0).view(7, 3)).sum()


def resized_by_lines(w: Tensor) -> Tensor:
    image = F.interpolate(w[None, None], scale_factor=2.0, mode="bilinear")
    return (F.interpolate(image, size=(5, 3), mode="bicubic", align_corners=True) * torch.arange(15.0).view(5, 3)).sum()


@pytest.mark.short_cases("solved_for_both", "resized")
@pytest.mark.parametrize(
    "function", [solved, solved_for_both, solved_for_one, resized, resized_exactly, resized_by_lines]
)
def test_later_backwards_are_eagers(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    w = torch.randn(4, 4, requires_grad=True)
    before = len(retrograd.explain_recompiles())
    if function is resized_by_lines:
        warnings.simplefilter("error", retrograd.EagerIslandWarning)
    for _ in range(3):
        (expected,) = torch.autograd.grad(function(w), w)
        w.grad = None
        with retrograd.enable():
            function(w).backward()
        torch.testing.assert_close(w.grad, expected, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            w.add_(0.1)
    assert [entry.outcome for entry in retrograd.explain_recompiles()[before:]] == ["compiled"]


def nearest(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=(3.0, 2.0), mode="nearest").square().sum()


def whole_times(x: Tensor) -> Tensor:
    return nearest(F.interpolate(x, scale_factor=2.0, mode="bilinear").square())


def curves(x: Tensor) -> Tensor:
    y = F.interpolate(x, size=(5, 7), mode="bicubic").cos()
    return whole_times(y) + F.interpolate(y, size=(4, 9), mode="bilinear", align_corners=True).square().sum()


@pytest.mark.filterwarnings("error::retrograd.EagerIslandWarning")
@pytest.mark.parametrize(
    ("backend", "function"),
    # A curve takes ten seconds to compile; what its gradient is made of, a unit test compares.
    [
        ("compile_backward", whole_times),
        pytest.param("compile_backward", curves, marks=pytest.mark.long),
        ("torch.compile", nearest),
    ],
    ids=["compile_backward", "curves", "torch.compile"],
)
def test_gradients_of_resized_images_are_sums_of_what_reads_each_element(
    backend: str, function: Callable[[Tensor], Tensor]
) -> None:
    """Of lines, curves and nearest elements."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 4, requires_grad=True)
    step = (
        torch.compile(function, backend="retrograd", options={"cache": False}, dynamic=False)
        if backend == "torch.compile"
        else retrograd.compile_backward(function, (x,), cache=False)
    )
    (expected,) = torch.autograd.grad(function(x), x)
    (found,) = torch.autograd.grad(step(x), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if isinstance(step, retrograd.CompiledBackward):
        assert "index_put" not in step.mlir("partitioned")


@pytest.mark.long
def test_images_of_any_size_are_resized() -> None:
    def function(x: Tensor) -> Tensor:
        near = F.interpolate(F.interpolate(x, size=(9, 5), mode="bicubic").sin(), size=(5, 7), mode="nearest")
        return near.square().sum() + F.interpolate(x, scale_factor=2.0, mode="bilinear").square().sum()

    x = torch.randn(2, 3, 8, 6, requires_grad=True)
    size = torch.export.Dim("size", min=2, max=64)
    step = retrograd.compile_backward(function, (x,), dynamic_shapes=({2: size},), cache=False)
    for length in (8, 9, 13):
        x = torch.randn(2, 3, length, 6, requires_grad=True)
        (expected,) = torch.autograd.grad(function(x), x)
        (found,) = torch.autograd.grad(step(x), x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
