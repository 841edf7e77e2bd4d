# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``x[mask]`` by masks of sizes and numbers alone has a known size; one that was written to is not taken for known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import retrograd
from retrograd.frontend.python.source_locations import CaptureError

Mask = Callable[[Tensor], Tensor]


def eye(x: Tensor) -> Tensor:
    return torch.eye(4, dtype=torch.bool, device=x.device)


def filled(x: Tensor) -> Tensor:
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask.fill_diagonal_(False)
    return mask


def same_label(x: Tensor) -> Tensor:
    labels = torch.arange(2).repeat(2)
    return (labels.unsqueeze(0) == labels.unsqueeze(1)) & ~eye(x)


KNOWN: dict[str, Mask] = {
    "all but the diagonal": lambda x: ~eye(x),
    "a triangle": lambda x: torch.triu(torch.ones_like(x, dtype=torch.bool), 1),
    "a comparison": lambda x: torch.arange(4)[:, None] != torch.arange(4)[None, :],
    "filled in place": filled,
    "the same label": same_label,
}


def through_a_view(x: Tensor) -> Tensor:
    mask = eye(x)
    mask.t()[0] = True
    return mask


def by_a_view_of_it(x: Tensor) -> Tensor:
    mask = eye(x)
    rows = mask.view(16)
    mask[1] = True
    return rows.view(4, 4)


def with_contents(x: Tensor) -> Tensor:
    mask = eye(x)
    mask |= x > 0
    return mask


def into_it(x: Tensor) -> Tensor:
    mask = eye(x)
    torch.logical_not(mask, out=mask)
    return mask


def uncounted(x: Tensor) -> Tensor:
    mask = eye(x)
    mask.t().data[0] = True
    return mask


UNKNOWN: dict[str, Mask] = {
    "contents": lambda x: (x > 0) & eye(x),
    "random": lambda x: torch.rand(4, 4) > 0.5,
    "written through a view": through_a_view,
    "a view of what was written": by_a_view_of_it,
    "written with contents": with_contents,
    "an output": into_it,
    "written through a view's data": uncounted,
}


def in_a_row(mask: Mask) -> Callable[[Tensor], Tensor]:
    """Something that needs the chosen elements in a row."""
    return lambda x: (x[mask(x)].cumsum(0) ** 2).sum()


@pytest.mark.long_cases("a triangle", "the same label", "all but the diagonal")
@pytest.mark.parametrize("name", KNOWN)
def test_known(name: str) -> None:
    torch.manual_seed(0)
    model, x = in_a_row(KNOWN[name]), torch.randn(4, 4, requires_grad=True)
    found = retrograd.compile_backward(model, (x,), fallback="error")(x)
    expected = model(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, x), torch.autograd.grad(expected, x))


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(name: str) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(CaptureError, match=r"cumsum, where the size of x\[mask\]"):
        retrograd.compile_backward(in_a_row(UNKNOWN[name]), (x,))


@pytest.mark.long
def test_contrastive_loss() -> None:
    """SimCLR's: of each row of similarities all but itself, in rows again."""

    def model(a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(torch.cat([a, b]), dim=-1)
        n = z.shape[0]
        similar = z @ z.t() / 0.5
        others = similar[~torch.eye(n, dtype=torch.bool)].view(n, n - 1)
        pairs = torch.cat([similar.diag(n // 2), similar.diag(-(n // 2))])
        return (torch.logsumexp(others, 1) - pairs).mean()

    torch.manual_seed(0)
    args = tuple(torch.randn(4, 8, requires_grad=True) for _ in range(2))
    found, expected = retrograd.compile_backward(model, args, fallback="error")(*args), model(*args)
    torch.testing.assert_close(found, expected)
    for ours, eager in zip(torch.autograd.grad(found, args), torch.autograd.grad(expected, args), strict=True):
        torch.testing.assert_close(ours, eager)


def test_a_selection_of_unknown_size_is_no_result() -> None:
    """Of a mask that the model wrote to; what stands for ``x[mask]`` while it is traced was given to the user."""

    def choose(x: Tensor, mask: Tensor) -> Tensor:
        mask.logical_not_()
        return x[mask].sin()

    x, mask = torch.randn(4, 3, requires_grad=True), torch.tensor([True, False, True, True])
    with pytest.raises(retrograd.CaptureError, match="a result, where the size of x\\[mask\\]"):
        retrograd.compile_backward(choose, (x, mask), cache=False)
