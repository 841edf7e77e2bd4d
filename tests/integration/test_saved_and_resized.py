# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Backwards under ``enable()`` whose nodes ask what was saved, or resize by other than whole numbers."""

from __future__ import annotations

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


@pytest.mark.short_cases("solved_for_both", "resized")
@pytest.mark.parametrize("function", [solved, solved_for_both, solved_for_one, resized, resized_exactly])
def test_later_backwards_are_eagers(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    w = torch.randn(4, 4, requires_grad=True)
    before = len(retrograd.explain_recompiles())
    for _ in range(3):
        (expected,) = torch.autograd.grad(function(w), w)
        w.grad = None
        with retrograd.enable():
            function(w).backward()
        torch.testing.assert_close(w.grad, expected, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            w.add_(0.1)
    assert [entry.outcome for entry in retrograd.explain_recompiles()[before:]] == ["compiled"]
