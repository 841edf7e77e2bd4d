# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Losses over classes as decompositions, against eager; nothing is compiled."""

from __future__ import annotations

import pytest
import torch
from decomposition_checks import assert_close
from torch import Tensor

from retrograd.frontend.decompositions.class_gradients import nll_loss_backward

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
SHAPES = {"scores": (5,), "batch": (4, 5), "image": (3, 5, 2, 4), "nothing": (0, 5)}


def make(shape: tuple[int, ...], ignored: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and targets some of which are ignored."""
    torch.manual_seed(0)
    axis = min(len(shape) - 1, 1)
    target = torch.randint(0, 5, shape[:axis] + shape[axis + 1 :])
    if target.numel() > 1:
        target.view(-1)[0] = ignored
    return torch.randn(shape, dtype=torch.float64).log_softmax(axis), target


@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_against_eager(shape: tuple[int, ...], weighted: bool, reduction: int, ignored: int) -> None:
    scores, target = make(shape, ignored)
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    forward, backward = aten.nll_loss_forward, aten.nll_loss_backward
    if len(shape) == 4:
        forward, backward = aten.nll_loss2d_forward, aten.nll_loss2d_backward
    loss, total = forward(scores, target, weight, reduction, ignored)
    tangent = torch.randn_like(loss)
    expected = backward(tangent, scores, target, weight, reduction, ignored, total)
    assert_close(nll_loss_backward(tangent, scores, target, weight, reduction, ignored, total), expected)


@pytest.mark.parametrize("bad", [5, -1])
def test_what_is_no_class_is_seen(bad: int) -> None:
    scores, target = make((4, 5), -100)
    target[2] = bad
    tangent = torch.ones(4, dtype=torch.float64)
    gradient = nll_loss_backward(tangent, scores, target, None, NONE, -100, torch.tensor(4.0))
    assert gradient.isnan().any(1).tolist() == [False, False, True, False]


def test_gradients_elsewhere_are_zero_whatever_comes_in() -> None:
    """As eager's: a product with zero would be NaN."""
    scores, target = make((4, 5), -100)
    tangent = torch.full((4,), torch.inf, dtype=torch.float64)
    found = nll_loss_backward(tangent, scores, target, None, NONE, -100, torch.tensor(4.0))
    expected = aten.nll_loss_backward(tangent, scores, target, None, NONE, -100, torch.tensor(4.0, dtype=torch.float64))
    assert_close(found, expected)
