# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Products of a mixture's experts, of releases of transformers whose gradient of them is a loop over their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from retrograd.frontend.traceable import experts
from retrograd.frontend.traceable.content_free import TraceableFunctions


@pytest.fixture(scope="module")
def packet() -> Any:
    # Here and not above: to import transformers takes a second, for whoever collects tests.
    from transformers.integrations import moe

    assert moe
    return torch.ops.transformers.grouped_mm_fallback


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_GRADIENT", "no_such_op")


@pytest.mark.parametrize("kind", ["packet", "overload"])
@pytest.mark.parametrize("ends", [(3, 3, 7), (0, 6, 6), (7, 7, 7)])
@pytest.mark.usefixtures("older")
def test_the_gradient_is_the_loops(packet: Any, kind: str, ends: tuple[int, ...]) -> None:
    """Also of experts without rows, and of rows that are no expert's."""
    product = packet if kind == "packet" else packet.default
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


def test_releases_with_an_op_for_the_gradient_are_left_as_they_are(packet: Any) -> None:
    assert experts.find_product(packet) is None
    assert experts.find_product(torch.ops.aten.mm) is None
