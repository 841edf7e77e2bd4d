# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Arguments that a model has require grad after it did something else with them, or that are given twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd


class Model(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.__dict__["function"] = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.__dict__["function"](self.linear, x)
        return result


def computes_before(linear: nn.Module, x: Tensor) -> Tensor:
    y = x.sin() * 3
    x.requires_grad_()
    result: Tensor = linear(x) + y
    return result


def views_before(linear: nn.Module, x: Tensor) -> Tensor:
    y = x[:]
    x.requires_grad = True
    result: Tensor = linear(x) + y
    return result


def asks_before(linear: nn.Module, x: Tensor) -> Tensor:
    if not x.requires_grad:
        x.requires_grad_()
        result: Tensor = linear(x)
        return result
    other: Tensor = linear(x) * 2
    return other


def takes_back(linear: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_()
    result: Tensor = linear(x)
    x.requires_grad_(False)
    return result


def retains(linear: nn.Module, x: Tensor) -> Tensor:
    x.retain_grad()
    result: Tensor = linear(x)
    return result


def as_told(linear: nn.Module, x: Tensor) -> Tensor:
    """By the remedy: nothing before but what goes by its form."""
    assert x.shape[-1] == 3 and x.is_floating_point() and len(x) == x.size(0)
    x.requires_grad_()
    result: Tensor = linear(x) + x.sin() * 3
    return result


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (computes_before, r"requires_grad_\(\), after it used it.*\n +y = x.sin\(\)(?s:.*)first line of forward"),
        (views_before, r"requires_grad = True, after it used it.*\n +y = x\[:\]"),
        (asks_before, r"requires_grad_\(\), after it used it.*\n +if not x.requires_grad"),
        (takes_back, r"require grad and then none(?s:.*)requires_grad_\(False\)"),
    ],
)
def test_what_was_done_before_is_refused(function: Callable[[nn.Module, Tensor], Tensor], says: str) -> None:
    with pytest.raises(retrograd.CaptureError, match=says):
        retrograd.compile_backward(Model(function), (torch.randn(2, 3),))


@pytest.mark.parametrize("function", [as_told, computes_before])
def test_remedies_work(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """In the first line of forward, or before the call."""
    model, requires = Model(function), function is computes_before
    step = retrograd.compile_backward(model, (torch.randn(2, 3, requires_grad=requires),))
    found = torch.randn(2, 3, requires_grad=requires)
    expected = found.detach().clone().requires_grad_(requires)
    for x, call in ((found, step), (expected, model)):
        call(x).square().sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        y.requires_grad_()
        result: Tensor = self.linear(x) + y * 2
        return result


def test_one_tensor_given_twice() -> None:
    """By its other name it would get no gradient."""
    model, x = Two(), torch.randn(2, 3)
    with pytest.raises(retrograd.CaptureError, match=r"a second time(?s:.*)clone"):
        retrograd.compile_backward(model, (x, x))
    step = retrograd.compile_backward(model, (x, x.clone()))
    with pytest.raises(retrograd.ArgumentError, match=r"args\[0\] is the same tensor as args\[1\](?s:.*)clone"):
        step(x, x)
    assert not x.requires_grad
    results: list[Any] = []
    for call in (step, model):
        given = x.clone()
        call(x, given).square().sum().backward()
        results.append(given.grad)
    torch.testing.assert_close(*results)


def test_gradient_of_an_argument_is_kept() -> None:
    """Of a leaf it is in any case; of another one the call is none for a program."""
    model, leaf = Model(retains), torch.randn(2, 3, requires_grad=True)
    step = retrograd.compile_backward(model, (leaf,))
    step(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.autograd.grad(model(leaf).sum(), leaf)[0])
    says = r"calls retain_grad\(\) on an argument(?s:.*)before the model"
    for compiles in (lambda x: step(x), lambda x: retrograd.compile_backward(model, (x,))):
        with pytest.raises(retrograd.CaptureError, match=says):
            compiles(leaf.detach().requires_grad_() * 2)
