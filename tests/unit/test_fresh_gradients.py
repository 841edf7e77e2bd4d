# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Leaves that a backward gives their first gradient, and how they are without it for a while."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from retrograd.frontend.autograd.engine.fresh_gradients import find_fresh_leaves, without_gradients
from retrograd.frontend.autograd.tracing.compiler import BackwardCall


class Scale(torch.autograd.Function):
    """Its node has an attribute of the name that PyTorch's nodes of leaves give theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = "its user's own"
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def test_leaves_without_a_gradient_are_fresh() -> None:
    fresh, other, given = leaf(), leaf(), leaf()
    given.grad = torch.ones(2)
    product = Scale.apply(fresh) * other * given  # type: ignore[no-untyped-call]
    found = find_fresh_leaves(BackwardCall([product.sum()], []))
    assert {id(tensor) for tensor in found} == {id(fresh), id(other)}
    (found_alone,) = find_fresh_leaves(BackwardCall([product.sum()], [other]))
    assert found_alone is other


def test_of_a_call_that_pytorch_refuses_there_are_none() -> None:
    x = leaf()
    assert find_fresh_leaves(BackwardCall([x.sum(), torch.ones(1)], [])) == []
    assert find_fresh_leaves(BackwardCall([x.sum()], [torch.ones(2)])) == []


def test_the_same_gradients_are_there_again_whatever_happens() -> None:
    first, none, gradient = leaf(), leaf(), torch.full((2,), 3.0)
    first.grad = gradient
    with pytest.raises(ValueError), without_gradients([first, none]):
        assert first.grad is None
        raise ValueError
    assert first.grad is gradient
    assert none.grad is None


class Stubborn:
    """A leaf whose gradient is of a kind that Python may not assign."""

    @property
    def grad(self) -> Tensor:
        return torch.ones(2)

    @grad.setter
    def grad(self, _: Tensor | None) -> None:
        raise RuntimeError("assigned grad has data of a different type")


def test_a_gradient_that_cannot_be_assigned_stays() -> None:
    stubborn: Any = Stubborn()
    after = leaf()
    after.grad = torch.ones(2)
    with without_gradients([stubborn, after]):
        inside = [stubborn.grad is None, after.grad is None]
    assert inside == [False, True]
    assert [stubborn.grad is None, after.grad is None] == [False, False]
