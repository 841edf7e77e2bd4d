# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Linear layers in half types whose products a CPU has units for, with their biases, and in a file without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd
from retrograd.frontend.libraries import cpu_units, ops


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)]
)
def test_gradients_are_eagers(
    dtype: torch.dtype, autocast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_units, "has_matrix_units", lambda: True)
    for module in (cpu_units, ops):
        monkeypatch.setattr(module, "has_half_units", lambda: True)
    model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
    model = model if autocast else model.to(dtype)
    x = torch.randn(16, 8, dtype=torch.float32 if autocast else dtype)

    def gradients(call: nn.Module, around: bool) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            y = call(leaf)
        y.float().square().mean().backward()
        return [t.grad.float() for t in (leaf, *model.parameters()) if t.grad is not None]

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        step = retrograd.compile_backward(model, (x.clone().requires_grad_(),), kernels="library", fallback="error")
    islands = [island["what"] for island in step.explain().to_dict()["islands"]]
    assert sum("aten.addmm" in what for what in islands) == 2
    calls: list[Any] = [step]
    if dtype is torch.bfloat16 and not autocast:
        step.save(tmp_path / "linear.bwd")
        calls.append(retrograd.load(tmp_path / "linear.bwd").bind(model))
    expected = gradients(model, autocast)
    for call in calls:
        found = gradients(call, autocast)
        assert len(found) == len(expected) == 5
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).norm() <= 2e-2 * theirs.norm()
