# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions where an approximation has few digits left, compiled, beside PyTorch's in f64."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import retrograd


class Tangents(nn.Module):
    def forward(self, x: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tan(x), torch.tan(wide)


def near_poles() -> Tensor:
    """Numbers about the multiples of pi / 2, from 1e-4 to 0.7 away, in f64 but exact in f32."""
    multiples = torch.arange(-40, 41, dtype=torch.float64).unsqueeze(-1) * (math.pi / 2)
    offsets = torch.tensor([-0.7, -1e-2, -1e-4, 1e-4, 3e-3, 0.5], dtype=torch.float64)
    return (multiples + offsets).flatten().float().double()


def test_tangents_and_their_gradients_near_poles() -> None:
    exact = near_poles().requires_grad_()
    arguments = exact.detach().float().requires_grad_(), exact.detach().clone().requires_grad_()
    step = retrograd.compile_backward(Tangents(), arguments)
    expected = torch.tan(exact)
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    found = step(*arguments)
    gradients = torch.autograd.grad([t.sum() for t in found], arguments)
    for ours, gradient, tolerance in zip(found, gradients, (1e-6, 1e-14), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=0.0)
        torch.testing.assert_close(gradient.double(), slope, rtol=2 * tolerance, atol=0.0)
