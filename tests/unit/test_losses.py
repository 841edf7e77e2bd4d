# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Losses as formulas: values and gradients beside PyTorch's own."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from retrograd.frontend.losses import TraceableLosses


def check(loss: Callable[..., Tensor], *leaves: Tensor) -> None:
    """The loss and its gradients, with weights that differ from element to element."""

    def run() -> list[Tensor]:
        value = loss(*leaves)
        weights = torch.arange(1.0, 1 + value.numel(), dtype=value.dtype).reshape(value.shape)
        return [value.detach(), *torch.autograd.grad((value * weights).sum(), leaves)]

    expected = run()
    with TraceableLosses():
        found = run()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("shape", [(4, 3), (4, 1), (4,)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("full", [True, False])
def test_gaussian_nll_loss(full: bool, reduction: str, shape: tuple[int, ...]) -> None:
    """One variance is below eps: it is raised to it, and has the gradient that it has there."""
    torch.manual_seed(0)
    means, variances = (torch.rand(s, dtype=torch.float64) for s in ((4, 3), shape))
    variances[0] = 1e-9
    target = torch.randn(4, 3, dtype=torch.float64)
    check(
        lambda x, v: F.gaussian_nll_loss(x, target, v, full=full, reduction=reduction),
        means.requires_grad_(),
        variances.requires_grad_(),
    )


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_multilabel_margin_loss_has_the_shape_it_has_in_eager(reduction: str, shape: tuple[int, ...]) -> None:
    target = torch.tensor([3, 0, -1, 1]).expand(shape)
    with FakeTensorMode() as mode, TraceableLosses():
        made = F.multilabel_margin_loss(
            mode.from_tensor(torch.ones(shape)), mode.from_tensor(target), reduction=reduction
        )
    assert made.shape == F.multilabel_margin_loss(torch.ones(shape), target, reduction=reduction).shape


def test_variance_below_zero_gives_no_number() -> None:
    with TraceableLosses():
        loss = F.gaussian_nll_loss(torch.ones(2), torch.ones(2), torch.tensor([1.0, -1.0]))
    assert loss.isnan()
