# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions where an approximation has few digits left, compiled, beside PyTorch's in f64."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import retrograd


class Tangents(nn.Module):
    def forward(self, x: Tensor, wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tan(x), torch.tan(wide), torch.tanh(x)


def near_poles() -> Tensor:
    """Numbers about the multiples of pi / 2, from 1e-4 to 0.7 away, in f64 but exact in f32."""
    multiples = torch.arange(-40, 41, dtype=torch.float64).unsqueeze(-1) * (math.pi / 2)
    offsets = torch.tensor([-0.7, -1e-2, -1e-4, 1e-4, 3e-3, 0.5], dtype=torch.float64)
    return (multiples + offsets).flatten().float().double()


def test_tangents_near_poles_and_hyperbolic_ones_near_one() -> None:
    exact = near_poles().requires_grad_()
    arguments = exact.detach().float().requires_grad_(), exact.detach().clone().requires_grad_()
    *found, hyperbolic = retrograd.compile_backward(Tangents(), arguments)(*arguments)
    expected = torch.tan(exact)
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    gradients = torch.autograd.grad([t.sum() for t in found], arguments, retain_graph=True)
    for ours, gradient, tolerance in zip(found, gradients, (1e-6, 1e-14), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=0.0)
        torch.testing.assert_close(gradient.double(), slope, rtol=2 * tolerance, atol=0.0)
    # The gradient is as exact as its tanh is: 1 - tanh(x)**2 loses what tanh rounds.
    torch.testing.assert_close(hyperbolic.double(), torch.tanh(exact), rtol=3e-7, atol=0.0)
    assert float((hyperbolic.double() - torch.tanh(exact)).detach().abs().max()) < 1e-7
    (found_slope,) = torch.autograd.grad(hyperbolic.sum(), arguments[0])
    torch.testing.assert_close(found_slope.double(), 1 - torch.tanh(exact).square(), rtol=0.0, atol=2.5e-7)
