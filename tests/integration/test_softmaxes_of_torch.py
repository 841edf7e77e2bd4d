# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention written out around a softmax that PyTorch computes, against eager in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import retrograd


class Attention(nn.Module):
    """Of one head with a mask, the softmax along the last axis or the one before it."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.project, self.axis = nn.Linear(6, 18), axis

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1) * 0.4).masked_fill(mask, -torch.inf)
        loss: Tensor = (scores.softmax(self.axis) @ v).sin().sum()
        return loss


def _gradients(call: nn.Module, model: nn.Module, x: Tensor, mask: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    call(leaf, mask).backward()
    return [g for g in (leaf.grad, *(p.grad for p in model.parameters())) if g is not None]


@pytest.mark.parametrize("axis", [-1, -2])
def test_gradients_are_exact(axis: int, tmp_path: Path) -> None:
    model, exact = Attention(axis), Attention(axis).double()
    exact.load_state_dict(model.state_dict())
    x, mask = torch.randn(3, 9, 6), torch.ones(9, 9, dtype=torch.bool).triu(1)
    mask = mask if axis == -1 else mask.t().contiguous()
    step = retrograd.compile_backward(model, (x.clone().requires_grad_(), mask), kernels="library", fallback="error")
    islands = " ".join(island["what"] for island in step.explain().to_dict()["islands"])
    assert "aten._softmax " in islands or "aten._softmax," in islands
    assert "aten._softmax_backward_data" in islands
    step.save(tmp_path / "attention.bwd")
    expected = _gradients(exact, exact, x.double(), mask)
    for call in (step, retrograd.load(tmp_path / "attention.bwd").bind(model)):
        found = _gradients(call, model, x, mask)  # type: ignore[arg-type]
        assert len(found) == len(expected) == 3
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.double() - theirs).norm() <= 2e-6 * theirs.norm()
