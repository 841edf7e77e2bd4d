# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention whose bias has a gradient as an op: against torch's own, its gradients, and how its results lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from retrograd.frontend.layers.biased_attention import BIASED_ATTENTION, BIASED_ATTENTION_BACKWARD

BATCH, HEADS, ROWS, COLUMNS, WIDTH = 2, 4, 5, 6, 8
BIASES = [(BATCH, HEADS, ROWS, COLUMNS), (1, HEADS, ROWS, COLUMNS), (HEADS, 1, COLUMNS), (ROWS, COLUMNS)]


def _operands(bias: tuple[int, ...], key_heads: int = HEADS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    keys = (BATCH, key_heads, COLUMNS, WIDTH)
    shapes = [(BATCH, HEADS, ROWS, WIDTH), keys, keys, bias]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("bias", BIASES)
def test_it_is_torchs(bias: tuple[int, ...], key_heads: int, scale: float | None, causal: bool) -> None:
    operands = _operands(bias, key_heads)
    query, key, value, added = operands
    hidden = torch.full((ROWS, COLUMNS), float("-inf"), dtype=added.dtype).triu(1)
    mask = added + hidden if causal else added
    expected = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=key_heads != HEADS)
    op: Any = BIASED_ATTENTION
    found, _ = op(*operands, causal, scale)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, operands, grad), torch.autograd.grad(expected, operands, grad)
    )


def test_gradients_of_two_orders() -> None:
    operands = _operands(BIASES[1])

    def attend(*given: Tensor) -> Tensor:
        op: Any = BIASED_ATTENTION
        found: Tensor = op(*given, False, None)[0]
        return found

    assert torch.autograd.gradcheck(attend, operands)
    assert torch.autograd.gradgradcheck(attend, operands, fast_mode=True)


def test_results_lie_as_traced() -> None:
    forward: Any = BIASED_ATTENTION
    backward: Any = BIASED_ATTENTION_BACKWARD

    def run(*given: Tensor) -> list[Tensor]:
        with torch.no_grad():
            out, sums = forward(*given, False, None)
            return [out, sums, *backward(out, *given, out, sums, False, None)]

    operands = _operands(BIASES[2], dtype=torch.float32)
    with FakeTensorMode() as mode:
        fake = run(*(mode.from_tensor(t) for t in operands))
    real = run(*operands)
    assert [(t.shape, t.stride(), t.dtype) for t in fake] == [(t.shape, t.stride(), t.dtype) for t in real]
