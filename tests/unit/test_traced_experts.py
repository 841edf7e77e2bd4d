# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of a mixture's experts, of releases of transformers whose gradient of them is a loop over their rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.integrations import moe

from retrograd.frontend.traceable import experts
from retrograd.frontend.traceable.content_free import TraceableFunctions

assert moe
PRODUCT = torch.ops.transformers.grouped_mm_fallback


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_GRADIENT", "no_such_op")


@pytest.mark.parametrize("product", [PRODUCT, PRODUCT.default], ids=["packet", "overload"])
@pytest.mark.parametrize("ends", [(3, 3, 7), (0, 6, 6), (7, 7, 7)])
@pytest.mark.usefixtures("older")
def test_the_gradient_is_the_loops(product: Callable[..., Tensor], ends: tuple[int, ...]) -> None:
    """Also of experts without rows, and of rows that are no expert's."""
    torch.manual_seed(0)
    rows, matrices = torch.randn(7, 4, requires_grad=True), torch.randn(3, 4, 5, requires_grad=True)
    offsets, tangent = torch.tensor(ends, dtype=torch.int32), torch.randn(7, 5)
    with TraceableFunctions():
        found = product(rows, matrices, offsets)
    expected = product(rows, matrices, offsets)
    assert "GroupedProduct" in str(found.grad_fn)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(result, (rows, matrices), tangent) for result in (found, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.usefixtures("older")
def test_open_sizes_are_left_to_the_library() -> None:
    assert experts.multiply(torch.ones(0, 4), torch.ones(3, 4, 5), torch.zeros(3, dtype=torch.int32)) is NotImplemented


def test_releases_with_an_op_for_the_gradient_are_left_as_they_are() -> None:
    assert experts.find_product(PRODUCT) is None
    assert experts.find_product(torch.ops.aten.mm) is None
