# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Models that change from step to step, by attributes that they set and by what numpy draws, train as in eager."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import retrograd

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Running(nn.Module):
    """A running center, a queue, a count of steps, a mean that is no buffer and what is kept to look at."""

    center: Tensor
    step: Tensor
    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("step", torch.tensor(0))
        self.register_buffer("queue", torch.randn(4, 3))
        self.mean: Any = 0.0
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.center = self.center * 0.9 + self.linear(x).mean(0) * 0.1
        self.step = self.step + 1
        y: Tensor = self.linear(x) - self.center - self.mean
        similar = y @ self.queue.t() / self.step
        self.mean = y.detach().mean(0) * 0.1
        self.queue = torch.cat([self.queue, y.detach()])[-4:]
        self.kept = {"loss": y.square().sum(), "rows": [y.detach(), x]}
        return similar.softmax(-1)


def draw_mask(shape: tuple[int, int], share: float) -> Any:
    mask = np.zeros(shape, dtype=bool)
    for row in mask:
        count = int(share * shape[1] + np.random.rand(1).item())
        row[np.random.choice(shape[1], count, replace=False)] = True
    return mask


class Masked(nn.Module):
    """Puts a parameter where a mask is that numpy draws, as SpecAugment does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.masked = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        mask = torch.tensor(draw_mask((x.shape[0], x.shape[1]), 0.3), device=x.device, dtype=torch.bool)
        hidden[mask] = self.masked.to(hidden.dtype)
        out: Tensor = self.last(hidden.tanh())
        return out


class Rolled(nn.Module):
    """Windows put together, rolled by two axes, given and read besides: as Swin v2's blocks are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.rand(16)), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x * self.weight).view(2, 2, 2, 4, 4, 16).permute(0, 1, 3, 2, 4, 5).reshape(2, 8, 8, 16)
        z = torch.roll(y, (2, 2), (1, 2)).reshape(2, 64, 16)
        return z, self.norm(z)


def step(model: nn.Module, call: Any, x: Tensor) -> dict[str, Tensor]:
    """Outputs, gradients and buffers of one step."""
    np.random.seed(int(x.sum().abs().item() * 100) % 1000)
    x = x.detach().clone().requires_grad_()
    outputs = call(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward([(o * torch.linspace(0, 1, o.numel(), device=o.device).view_as(o)).sum() for o in outputs])
    found = {f"output {i}": o.detach() for i, o in enumerate(outputs)} | {"x": x.grad}
    found |= {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())
    if isinstance(model, Running):
        found |= {"loss": model.kept["loss"].detach(), "row": model.kept["rows"][0], "mean": model.mean}
    found = {key: value.detach().clone() for key, value in found.items() if value is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize(("kind", "size"), [(Running, (2, 3)), (Masked, (4, 8, 8)), (Rolled, (8, 4, 4, 16))])
def test_what_changes_between_steps_is_as_in_eager(kind: type[nn.Module], size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = kind().cuda()
    twin = copy.deepcopy(model)
    batches = [torch.randn(size, device="cuda") for _ in range(6)]
    compiled = retrograd.compile_backward(model, (batches[0].clone().requires_grad_(),))
    for number, x in enumerate(batches):
        ours, theirs = step(model, compiled, x), step(twin, twin, x)
        assert ours.keys() == theirs.keys()
        for key, expected in theirs.items():
            assert torch.allclose(ours[key], expected, rtol=1e-4, atol=1e-5), (number, key)


def test_windows_that_are_rolled_are_queued_without_waiting() -> None:
    model = Rolled().cuda()
    compiled = retrograd.compile_backward(model, (torch.randn(8, 4, 4, 16, device="cuda"),), verify=False)
    assert not [line for line in compiled.manifest.report["kernels"] if "waits for the device" in line]
