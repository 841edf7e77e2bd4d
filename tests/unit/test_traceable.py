# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions that look at what is in a tensor can be traced, and give what they give in eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.traceable.content_free import TraceableFunctions

FILLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "method": lambda x, i, v: x.index_fill(0, i, v),
    "function": lambda x, i, v: torch.index_fill(x, -1, i, v),
    "in place": lambda x, i, v: x.clone().index_fill_(1, i, v),
    "number": lambda x, i, v: x.index_fill(1, i, 3.0) * v,
    "no axes": lambda x, i, v: x * x[0, 0].index_fill(0, i[:1] * 0, v),
    "one index": lambda x, i, v: x.index_fill(0, i[0], v),
}


@pytest.mark.parametrize("name", FILLS)
def test_index_fill(name: str) -> None:
    """With the gradient of a tensor that is filled in, once for each place that is named."""
    torch.manual_seed(0)
    x, value = torch.randn(4, 5, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    given = x, torch.tensor([1, 2, 1]), value, torch.randn(4, 5)

    def run(x: Tensor, index: Tensor, value: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        filled = FILLS[name](x, index, value)
        return filled, *torch.autograd.grad((filled * weights).sum(), (x, value))

    with TraceableFunctions():
        traced = make_fx(run, tracing_mode="fake")(*given)
    torch.testing.assert_close(traced(*given), run(*given))


def put_after(keys: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What writes to a copy of a tensor of axes 4, 3 and 5, where the keys for masks of 4 and 3 by 5 say."""

    def write(x: Tensor, v: Tensor, masks: Tensor) -> Tensor:
        out = x * 1
        out[keys(masks[:, 0, 0], masks[0])] = v
        return out

    return write


MASKED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "a number": (put_after(lambda rows, inner: rows), ()),
    "a row for all": (put_after(lambda rows, inner: rows), (5,)),
    "a row for each": (put_after(lambda rows, inner: rows), (2, 3, 5)),
    "leading ones": (put_after(lambda rows, inner: rows), (1, 1, 3, 5)),
    "axes behind": (put_after(lambda rows, inner: (..., inner)), (4, 1)),
    "axes before": (put_after(lambda rows, inner: (slice(None), inner)), (6,)),
    "in order": (put_after(lambda rows, inner: (rows, ...)), (2, 1, 5)),
    "function": (lambda x, v, m: torch.index_put(x, (m,), v), ()),
    "added": (lambda x, v, m: x.index_put((m[:, 0, 0],), v, accumulate=True), (2, 1, 5)),
    "in place": (lambda x, v, m: (x * 1).index_put_((m,), v), (1,)),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_assignment(name: str) -> None:
    """With the gradient of what is written, also where all that is chosen gets the same."""
    torch.manual_seed(0)
    write, shape = MASKED[name]
    x, value = torch.randn(4, 3, 5, requires_grad=True), torch.randn(shape, requires_grad=True)
    masks = torch.zeros(4, 3, 5, dtype=torch.bool)
    masks[1:3, 0, 0] = True
    masks[0, 0, 2:], masks[0, 1:, 1], masks[0, 2, 3] = True, True, True
    given = x, value, masks, torch.randn(4, 3, 5)

    def run(x: Tensor, value: Tensor, masks: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        filled = write(x, value, masks)
        return filled, *torch.autograd.grad((filled * weights).sum(), (x, value))

    with TraceableFunctions():
        traced = make_fx(run, tracing_mode="fake")(*given)
    torch.testing.assert_close(traced(*given), run(*given))
