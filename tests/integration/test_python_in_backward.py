# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Python of the user's that runs in a backward, and there reads or differentiates the model's own parameters."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import retrograd

SLOPE = 2.0


class Adjoint(torch.autograd.Function):
    """A step of an equation, forgotten, and made once more for its gradients, as solvers with adjoints do."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.field = field
        ctx.save_for_backward(y, *parameters)
        with torch.no_grad():
            stepped: Tensor = y + 0.2 * field(y)
        return stepped

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        start, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            y = start.detach().requires_grad_()
            found = torch.autograd.grad(ctx.field(y), (y, *parameters), gradients[0], allow_unused=True)
        given = [torch.zeros_like(p) if g is None else g for g, p in zip(found, (y, *parameters), strict=True)]
        return None, gradients[0] + 0.2 * given[0], *[0.2 * SLOPE * g for g in given[1:]]


class Equation(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("calls", torch.ones(()))
        self.share = 1.5

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Adjoint.apply(self.field, x * self.scale, *self.field.parameters())  # type: ignore[no-untyped-call]
        y.register_hook(lambda gradient: gradient * self.scale.detach() * self.calls * self.share)
        self.calls += 1
        return y


def test_parameters_in_the_backward_of_a_custom_function_and_in_a_hook() -> None:
    """To a trace they were constants, and their gradients from an adjoint zero, without a word."""
    global SLOPE
    torch.manual_seed(0)
    model, x = Equation(), torch.randn(4, 2)
    eager = copy.deepcopy(model)
    step = retrograd.compile_backward(model, (x,))
    for turn in range(3):
        found: list[list[Tensor]] = []
        for module, call in ((model, step), (eager, eager)):
            loss = call(x).square().sum()
            gradients = torch.autograd.grad(loss, list(module.parameters()))
            found.append([*gradients, module.calls])
            with torch.no_grad():
                for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.01)
        torch.testing.assert_close(found[0], found[1])
        # Numbers that only the backward reads are looked at before each call, as others are.
        if turn == 1:
            SLOPE, model.share, eager.share = 3.0, 0.5, 0.5
