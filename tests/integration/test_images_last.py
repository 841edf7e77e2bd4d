# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Images with channels last between a library's convolutions, compiled for a CPU: gradients are eager's."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograd
from retrograd.frontend.libraries.ops import Libraries
from retrograd.options import Request


class Pools(nn.Module):
    """Images [2, 3, 9, 8] through convolutions that leave them as they are, to maxima of windows of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Sequential(*(nn.Conv2d(3, 3, 1, groups=3, bias=False) for _ in range(3)))
        for parameter in self.same.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.same(x)
        return (
            F.max_pool2d(y, 3, 2, 1),
            F.max_pool2d(y, 2, 3),
            F.max_pool2d(y, (3, 2), (1, 2), (1, 0), (2, 1)),
            F.max_pool2d(y, 3, 2, (0, 1), ceil_mode=True),
        )


class Net(nn.Module):
    """Images [N, 3, H, W] to classes: a first layer of three colors, a pool, a depthwise and a grouped convolution, a
    gate for each channel, a norm over groups, a transposed convolution, and two branches that are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.groups = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(2, 8)
        self.grouped, self.narrow = nn.Conv2d(8, 16, 3, 2, 1, groups=4), nn.Conv2d(8, 16, 1, 2)
        self.gate, self.up, self.head = nn.Linear(16, 16), nn.ConvTranspose2d(32, 4, 3, 2), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        z = y + F.gelu(self.groups(self.depthwise(y)))
        z, w = self.grouped(z), self.narrow(y)
        z = z * self.gate(z.mean((2, 3))).sigmoid()[:, :, None, None]
        return self.head(self.up(torch.cat([z, w], 1)).amax((2, 3)))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def laid_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions have channels last, as they have for a CUDA device with kernels that add up columns."""
    monkeypatch.setattr(Request, "_libraries", lambda *_: replace(Libraries(cpu=0, products=False), channels_last=True))


def test_maxima_of_windows() -> None:
    """Among them are equal ones, infinities and what is no number."""
    model = Pools().double()
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64).round()
    x[0, 0, 2, 3], x[0, 1, 4, 4], x[1, 2] = math.nan, math.inf, -math.inf
    x.requires_grad_()
    compiled = retrograd.compile_backward(model, (x,), fallback="error")
    assert "retrograd.max_pool_last_backward" in compiled.mlir("partitioned")
    found, expected = compiled(x), model(x)
    tangents = [torch.randn_like(y) for y in expected]
    ours, theirs = (torch.autograd.grad(outputs, x, tangents) for outputs in (found, expected))
    torch.testing.assert_close([*found, *ours], [*expected, *theirs], equal_nan=True)


@pytest.mark.long
def test_gradients_are_eagers() -> None:
    model = Net().double()
    x = torch.randn(2, 3, 33, 31, dtype=torch.float64, requires_grad=True)
    eager = copy.deepcopy(model)
    eager(x).square().mean().backward()
    expected, x.grad = x.grad, None
    compiled = retrograd.compile_backward(model, (x,))
    compiled(x).square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close([x.grad, *found.values()], [expected, *(p.grad for p in eager.parameters())])
    assert all(grad is not None and grad.is_contiguous() for grad in found.values())
    assert "retrograd.max_pool_last" in compiled.mlir("partitioned")


@pytest.mark.long
def test_a_file_holds_them_compiled(tmp_path: object) -> None:
    model = Net()
    x = torch.randn(2, 3, 17, 15)
    compiled = retrograd.compile_backward(model, (x,))
    expected = torch.autograd.grad(compiled(x).square().mean(), list(model.parameters()))
    compiled.save(f"{tmp_path}/net.rgb")
    loaded = retrograd.load(f"{tmp_path}/net.rgb").bind(model)
    found = torch.autograd.grad(loaded(x).square().mean(), list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
