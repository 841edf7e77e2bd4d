# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A network trained to solve Burgers' equation, by gradients of gradients. After "Physics-informed neural networks"
(Raissi et al., 2019)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from models.case import Case, Entry, identity

VISCOSITY = 0.01 / math.pi


class Burgers(nn.Module):
    """Points (x, t), [points, 1] each, to the mean square by which u(x, t) fails ``u_t + u u_x = v u_xx`` inside and
    ``u(x, 0) = -sin(pi x)`` at the start."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        hidden = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), nn.Tanh())]
        self.network = nn.Sequential(nn.Linear(2, width), nn.Tanh(), *hidden, nn.Linear(width, 1))

    def u(self, x: Tensor, t: Tensor) -> Tensor:
        return self.network(torch.cat([x, t], dim=1))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
        u = self.u(x, t)
        u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        residual = u_t + u * u_x - VISCOSITY * u_xx
        start = self.u(x, torch.zeros_like(t)) + torch.sin(math.pi * x)
        return residual.square().mean() + start.square().mean()


def pinn(points: int, width: int, layers: int) -> Case:
    points_x, points_t = 2 * torch.rand(points, 1) - 1, torch.rand(points, 1)
    return Case(Burgers(width, layers), (points_x, points_t), identity)


ENTRIES = (
    Entry(
        "pinn",
        pinn,
        {"test": {"points": 8, "width": 6, "layers": 2}, "bench": {"points": 8192, "width": 64, "layers": 6}},
    ),
)
