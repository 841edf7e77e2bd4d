# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Python of the user's that runs in a backward, and there reads or differentiates the model's own parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
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


class Masking(torch.autograd.Function):
    """Leaves its mask in a module, and finds it there in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module, module.mask = module, (x > 0).to(x.dtype)
        return x * module.mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.module.mask * 3, None


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.last, self.mask = torch.zeros(2, 3), None

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.last = h.detach()
        h.register_hook(lambda gradient: gradient * self.last)
        masked: Tensor = Masking.apply(h, self)  # type: ignore[no-untyped-call]
        return masked


def test_attributes_that_the_forward_sets_and_the_backward_reads() -> None:
    """A trace of the backward found in them what was there before the forward."""
    torch.manual_seed(0)
    model, x = Remembering(), torch.randn(2, 3)
    eager = copy.deepcopy(model)
    step = retrograd.compile_backward(model, (x,))
    assert model.mask is None and not model.last.any()
    for _ in range(2):
        x = torch.randn(2, 3)
        found = [
            torch.autograd.grad(call(x).square().sum(), list(module.parameters()))
            for module, call in ((model, step), (eager, eager))
        ]
        assert found[1][0].any()
        torch.testing.assert_close(*found)
        torch.testing.assert_close(model.last, eager.last)


class Counting(nn.Module):
    """The largest gradients are kept by a hook, as training in float8 does."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        h.register_hook(self.scale)
        return h * 1

    def scale(self, gradient: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, gradient.abs().max()))
        return gradient / self.largest


class Scaled(torch.autograd.Function):
    """Has the hook for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Counting) -> Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.model.scale(gradient), None


class CountingInFunction(Counting):
    """Keeps them in the backward of a custom function."""

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = Scaled.apply(self.linear(x), self)  # type: ignore[no-untyped-call]
        return scaled


def test_a_backward_that_writes_is_refused_or_runs_in_eager(caplog: pytest.LogCaptureFixture) -> None:
    """It failed in the import, with torch-mlir's words. A hook that writes is called."""
    torch.manual_seed(0)
    model, x = Counting(), torch.randn(2, 3)
    with pytest.raises(
        retrograd.CaptureError, match=r"the backward writes to a buffer.*\n.*write to it in the forward"
    ):
        retrograd.compile_backward(CountingInFunction(), (x,))
    eager, called = copy.deepcopy(model), copy.deepcopy(model)
    step = torch.compile(model, backend="retrograd")
    ahead = retrograd.compile_backward(called, (x,))
    for _ in range(2):
        for module, call in ((model, step), (called, ahead), (eager, eager)):
            module.zero_grad()
            call(x).square().sum().backward()
        for module in (model, called):
            torch.testing.assert_close(module.largest, eager.largest)
            torch.testing.assert_close(module.linear.weight.grad, eager.linear.weight.grad)
    assert "run in eager: the backward writes to a buffer" in caplog.text
