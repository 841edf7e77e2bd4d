# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Backwards of one graph that is kept give the same to the last bit inside of ``retrograd.enable()``."""

from __future__ import annotations

from typing import Any

import torch

import retrograd


class Squares(torch.autograd.Function):
    """A function in Python, which has part in a backward: what it is given decides on what comes after it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        given: torch.Tensor = 2 * x * gradients[0]
        return given


def gradients(w: torch.Tensor, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Those of three backwards, each from a root of its own."""
    squares: Any = Squares.apply((x @ w).softmax(1))  # type: ignore[no-untyped-call]
    out = (squares @ w).sin().softmax(1) @ w
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    return [torch.autograd.grad(out.clone(), w, weights, retain_graph=True)[0] for _ in range(3)]


def test_recorded_and_compiled_ones_are_not_mixed_in_one_graph() -> None:
    torch.manual_seed(0)
    w, x = torch.randn(96, 96, requires_grad=True), torch.randn(64, 96)
    before = len(retrograd.explain_recompiles())
    for seed in range(3):
        expected = gradients(w, x, seed)[0]
        with retrograd.enable():
            first, *others = gradients(w, x, seed)
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)
        assert all(torch.equal(first, other) for other in others)
    assert [entry.outcome for entry in retrograd.explain_recompiles()[before:]] == ["compiled"]
