# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The gradient of negative log-likelihoods as a decomposition, against eager; nothing is compiled."""

from __future__ import annotations

import pytest
import torch

from retrograd.frontend.decompositions.likelihoods import nll_loss_backward

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shape", [(5,), (6, 5), (2, 5, 3, 4)])
def test_nll_loss_backward(
    shape: tuple[int, ...], reduction: int, weighted: bool, ignored: int, dtype: torch.dtype
) -> None:
    x = torch.randn(shape, dtype=torch.float32).log_softmax(0 if len(shape) == 1 else 1).to(dtype)
    target = torch.randint(5, (shape[0], *shape[2:]) if len(shape) > 1 else ())
    if len(shape) > 1:
        target.view(-1)[0] = ignored
    weight = torch.rand(5).to(dtype) if weighted else None
    forward, backward = (
        (aten.nll_loss2d_forward, aten.nll_loss2d_backward)
        if len(shape) == 4
        else (aten.nll_loss_forward, aten.nll_loss_backward)
    )
    y, total = forward(x, target, weight, reduction, ignored)
    grad = torch.randn(y.shape).to(dtype)
    found = nll_loss_backward(grad, x, target, weight, reduction, ignored, total)
    wanted = backward(grad, x, target, weight, reduction, ignored, total)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted)


def test_where_all_is_ignored_the_gradient_is_zero() -> None:
    x, target = torch.randn(3, 5), torch.full((3,), -100)
    found = nll_loss_backward(torch.tensor(1.0), x, target, None, 1, -100, torch.tensor(0.0))
    assert torch.equal(found, torch.zeros(3, 5))
