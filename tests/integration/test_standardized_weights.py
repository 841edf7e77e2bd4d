# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Convolutions whose weights are standardized by PyTorch's batch norm, against eager in float64."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd


class Standardized(nn.Module):
    """Two convolutions of one standardized weight, which is given besides: the one result is read at three places."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(4, 4, 3, 3)), nn.Parameter(torch.rand(4, 1, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.weight.reshape(1, 4, -1)
        rows = F.batch_norm(rows, None, None, weight=self.gain.view(-1) * 0.5, training=True, momentum=0.0, eps=1e-6)
        weight = rows.reshape_as(self.weight)
        y = F.conv2d(x, weight, padding=1)
        return F.conv2d(F.silu(y), weight), weight


def _gradients(call: nn.Module, model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    y, weight = call(leaf)
    (y.sin().sum() + weight.square().mul(torch.arange(9).view(3, 3)).sum()).backward()
    return [g for g in (leaf.grad, *(p.grad for p in model.parameters())) if g is not None]


def test_gradients_are_exact(tmp_path: Path) -> None:
    model, exact = Standardized(), Standardized().double()
    exact.load_state_dict(model.state_dict())
    x = torch.randn(2, 4, 6, 6)
    step = retrograd.compile_backward(model, (x.clone().requires_grad_(),), kernels="library", fallback="error")
    islands = " ".join(island["what"] for island in step.explain().to_dict()["islands"])
    assert "_native_batch_norm_legit.no_stats" in islands
    assert "native_batch_norm_backward" in islands
    step.save(tmp_path / "standardized.bwd")
    expected = _gradients(exact, exact, x.double())
    for call in (step, retrograd.load(tmp_path / "standardized.bwd").bind(model)):
        # Twice: nothing of the first step is another's memory.
        for found in [_gradients(call, model, x) for _ in range(2)]:  # type: ignore[arg-type]
            assert len(found) == len(expected) == 3
            for ours, theirs in zip(found, expected, strict=True):
                assert (ours.double() - theirs).norm() <= 5e-6 * theirs.norm()
