# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Gradients that go where an element equals what was chosen of all: a maximum, a norm, the third greatest. They vanish,
or are 0 / 0, where the backward computes again what the forward compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import retrograd

Choice = Callable[[Tensor], Tensor]

GROUPS = torch.arange(32) // 8
CHOICES: dict[str, Choice] = {
    "amax": lambda h: h.amax(0),
    "max of all": lambda h: h.max(),
    "aminmax": lambda h: torch.stack(torch.aminmax(h, dim=1)),
    "infinite norm": lambda h: torch.linalg.vector_norm(h, float("inf"), dim=1),
    "pooled by group": lambda h: h.new_full((4, 16), -1e9).scatter_reduce(0, GROUPS[:, None].expand(32, 16), h, "amax"),
    "index_reduce": lambda h: h.new_full((4, 16), 1e9).index_reduce(0, GROUPS, h, "amin"),
    "Chebyshev distance": lambda h: torch.cdist(h, h.flip(0) * 2, p=float("inf")),
    "beyond the third": lambda h: F.relu(h - h.topk(3, dim=1).values[:, -1:]),
    "from the median": lambda h: (h - h.median(1, keepdim=True).values).abs(),
}


def loss_of(choice: Choice) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss of what is chosen of values that are cheap to compute again."""

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        gate = torch.sigmoid(x @ weight)
        chosen = choice(gate * torch.tanh(x * 1.3 + 0.1) + (1 - gate) * x)
        return chosen.square().sum() + chosen.sum()

    return loss


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(32, 16, requires_grad=True), (torch.randn(16, 16) / 4).requires_grad_()


def check(loss: Callable[[Tensor, Tensor], Tensor], **options: Any) -> None:
    """The first call's check would not see it: it takes what the compiled forward saved."""
    arguments = given()
    step = retrograd.compile_backward(loss, arguments, verify=False, **options)
    ours = torch.autograd.grad(step(*arguments), arguments)
    theirs = torch.autograd.grad(loss(*arguments), arguments)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.long_cases(
    "from the median",
    "beyond the third",
    "Chebyshev distance",
    "infinite norm",
    "pooled by group",
    "max of all",
    "index_reduce",
    "amax",
)
@pytest.mark.parametrize("name", CHOICES)
def test_gradients_go_to_what_was_chosen(name: str) -> None:
    check(loss_of(CHOICES[name]))


@pytest.mark.long
def test_in_a_checkpointed_block_that_gives_what_it_chose() -> None:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        def block(x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(x @ weight) * x
            return h, h.amax(1, keepdim=True)

        h, most = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return torch.where(h == most, h, 0).square().sum() + most.sum()  # type: ignore[no-any-return]

    check(loss)


def test_saved_in_a_narrower_type() -> None:
    check(loss_of(CHOICES["amax"]), save_policy=retrograd.saved_dtype("bf16", op="add.Tensor"), partition="default")


def test_under_torch_compile() -> None:
    arguments, loss = given(), loss_of(CHOICES["pooled by group"])
    ours = torch.autograd.grad(torch.compile(loss, backend="retrograd")(*arguments), arguments)
    theirs = torch.autograd.grad(loss(*arguments), arguments)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.short_cases("arange-shape1", "linspace-shape0")
@pytest.mark.parametrize("shape", [(8, 8), (3, 5, 8)])
@pytest.mark.parametrize(
    "spread", [lambda: torch.arange(8), lambda: torch.linspace(0, 1, 8)], ids=["arange", "linspace"]
)
def test_expected_places_compile_whole(shape: tuple[int, ...], spread: Callable[[], Tensor]) -> None:
    """As a soft argmax has them, without a first call that is compared: IREE checks its own passes then."""

    def loss(x: Tensor) -> Tensor:
        return (x.softmax(-1) * spread()).sum() + x.square().sum()

    x = torch.randn(*shape, requires_grad=True)
    step = retrograd.compile_backward(loss, (x,), verify=False, fallback="error")
    ours, theirs = (torch.autograd.grad(call(x), x) for call in (step, loss))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
