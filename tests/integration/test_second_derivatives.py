# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Gradients of gradients: inside of what is compiled, by torch.compile, and refused with a remedy that works."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd


def _critic() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def _penalty(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """WGAN-GP's: how far the critic's slope is from 1, beside its value."""
    (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    penalty: Tensor = (slope.norm(dim=1) - 1).square().mean()
    return penalty + run(x).mean()


def test_refused_with_the_line_and_a_remedy_that_works() -> None:
    critic, x = _critic(), torch.randn(5, 3, requires_grad=True)
    step = retrograd.compile_backward(critic, (x,))
    message = (
        r"gradients of gradients of Sequential.*retrograd.*line \d+, in _penalty\n.*create_graph(?s:.*)gradient penalty"
    )
    with pytest.raises(RuntimeError, match=message):
        _penalty(step, x).backward()
    whole = retrograd.compile_backward(nn.Module.__call__.__get__(Penalized(critic)), (x,))
    leaves = list(critic.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(whole(x), leaves, allow_unused=True),
        torch.autograd.grad(_penalty(critic, x), leaves, allow_unused=True),
    )


class Penalized(nn.Module):
    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, x: Tensor) -> Tensor:
        return _penalty(self.critic, x)


def test_torch_compile_computes_them_in_eager() -> None:
    critic, x = _critic(), torch.randn(5, 3, requires_grad=True)
    compiled: Any = torch.compile(critic, backend="retrograd")
    leaves = [*critic.parameters(), x]
    for _ in range(2):
        found, expected = _penalty(compiled, x), _penalty(critic, x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves))
    plain = compiled(x).sum(), critic(x).sum()
    torch.testing.assert_close(*[torch.autograd.grad(loss, leaves) for loss in plain])


def test_third_derivative() -> None:
    x = torch.randn(4, requires_grad=True)
    found = []
    for run in (torch.compile(lambda x: (x.sin() * x).sum(), backend="retrograd"), lambda x: (x.sin() * x).sum()):
        value = run(x)
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        found.append(value)
    torch.testing.assert_close(*found)


def test_argument_that_was_written_to_since() -> None:
    x = torch.randn(4)
    weight = torch.randn(4, requires_grad=True)
    loss = torch.compile(lambda x, w: (x * w).sin().sum(), backend="retrograd")(x, weight)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"gradients of gradients.*written to since|modified by an inplace"):
        torch.autograd.grad(loss, weight, create_graph=True)


def test_random_numbers_are_not_drawn_again() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh()), torch.randn(5, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"gradients of gradients of a graph of torch\.compile's"):
        _penalty(torch.compile(model, backend="retrograd"), x).backward()


def test_loss_that_is_kept_keeps_no_arguments() -> None:
    weight = torch.randn(3, requires_grad=True)
    x = torch.randn(3)
    seen = weakref.ref(x)
    loss = torch.compile(lambda x, w: (x * w).sum(), backend="retrograd")(x, weight)
    loss.backward()
    del x
    gc.collect()
    assert seen() is None and loss.grad_fn is not None


def test_only_frames_of_the_user_are_compiled_where_a_model_takes_a_gradient_itself() -> None:
    """Dynamo runs the gradient between two graphs, and would compile what of ours that calls as well: 80 frames."""
    critic, x = _critic(), torch.randn(2, 3, requires_grad=True)
    compiled, step = (torch.compile(function, backend="retrograd") for function in (critic, _penalty))
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["total"]
    for _ in range(2):
        found = torch.autograd.grad(step(compiled, x), [*critic.parameters()])
    torch.testing.assert_close(found, torch.autograd.grad(_penalty(critic, x), [*critic.parameters()]))
    assert 0 < frames["total"] - before <= 10


def test_gradient_inside_is_part_of_the_graph() -> None:
    """A hook on an argument or parameter, put there later too, sees such a gradient as in eager."""
    critic, x = _critic(), torch.randn(5, 3, requires_grad=True)
    leaves = [*critic.parameters(), x]
    compiled = torch.compile(lambda x: _penalty(critic, x), backend="retrograd", fullgraph=True)

    def compare() -> None:
        found, expected = compiled(x), _penalty(critic, x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves))

    compare()
    handle = x.register_hook(lambda grad: grad * 3)
    compare()
    handle.remove()
    compare()


def test_backward_inside_keeps_the_hooks_of_parameters() -> None:
    critic, x = _critic(), torch.randn(5, 3)
    seen: list[Tensor] = []
    weight = next(critic.parameters())

    def see(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())

    weight.register_hook(lambda grad: grad * 2)
    weight.register_post_accumulate_grad_hook(see)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = critic(x).square().mean()
        loss.backward()
        return loss.detach()

    for run in (torch.compile(step, backend="retrograd"), step):
        critic.zero_grad()
        run(x)
    torch.testing.assert_close(*seen)


def test_one_argument_is_computed_from_another() -> None:
    """Of both arguments a gradient is what this function adds to it, and hooks see it once."""

    def inner(run: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        w = torch.linspace(1, 2, 4, requires_grad=True)
        w.register_hook(lambda grad: grad * 3)
        first = torch.autograd.grad(run((w * 2).sin(), w), w, create_graph=True)[0]
        return first, torch.autograd.grad(first.square().sum(), w)[0]

    def product(h: Tensor, w: Tensor) -> Tensor:
        return (h * w).sum()

    torch.testing.assert_close(inner(torch.compile(product, backend="retrograd")), inner(product))
