# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions that look at what is in a tensor can be traced, and give what they give in eager."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.frontend.traceable import TraceableFunctions

FILLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "method": lambda x, i, v: x.index_fill(0, i, v),
    "function": lambda x, i, v: torch.index_fill(x, -1, i, v),
    "in place": lambda x, i, v: x.clone().index_fill_(1, i, v),
    "number": lambda x, i, v: x.index_fill(1, i, 3.0) * v,
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
