# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Decompositions of attention and its gradient against eager."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decomposition_checks import assert_close, check, traced
from torch import Tensor

from retrograd.frontend.decompositions.table import (
    DECOMPOSITIONS,
)

aten = torch.ops.aten

ATTENTION = [
    # heads, key heads, queries, keys, causal, mask, scale
    (3, 3, 5, 7, False, False, None),
    (3, 3, 6, 6, True, False, None),
    (2, 2, 5, 7, False, True, 0.3),
    (4, 2, 6, 6, True, False, None),
]


def attention_arguments(
    case: tuple[Any, ...], dtype: torch.dtype
) -> tuple[list[Tensor], tuple[float, bool], dict[str, Any]]:
    torch.manual_seed(0)
    heads, key_heads, queries, keys, causal, masked, scale = case
    query = torch.randn(2, heads, queries, 8).to(dtype)
    key, value = (torch.randn(2, key_heads, keys, 8).to(dtype) for _ in range(2))
    mask = torch.randn(queries, keys).to(dtype) if masked else None
    if mask is not None:
        mask[2] = -math.inf
        mask[0, 3] = -math.inf
    return [query, key, value], (0.0, causal), {"attn_mask": mask, "scale": scale}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    qkv, options, keywords = attention_arguments(case, dtype)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    check(op, *qkv, *options, **keywords, strides=True)
    check(op, *(t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv), *options, **keywords, strides=True)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    out, lse = op(*qkv, *options, **keywords)
    if case[0] == case[1]:
        check(backward, torch.randn_like(out), *qkv, out, lse, *options, **keywords, strides=True)


def test_grouped_query_attention_backward() -> None:
    """Against autograd of the written-out product: the kernel's own backward takes no grouped heads."""
    qkv, options, keywords = attention_arguments(ATTENTION[3], torch.float64)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(*qkv, *options, **keywords)
    grad = torch.randn_like(out)
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    ours = {e.op: e.function for e in DECOMPOSITIONS}[op](grad, *qkv, out, lse, *options, **keywords)
    query, key, value = (t.clone().requires_grad_() for t in qkv)
    wide = [t.repeat_interleave(2, 1) for t in (key, value)]
    scores = (query @ wide[0].mT / math.sqrt(8)).masked_fill(~torch.ones(6, 6).tril().bool(), -math.inf)
    theirs = torch.autograd.grad(scores.softmax(-1) @ wide[1], (query, key, value), grad)
    assert_close(ours, theirs)


def test_attention_refuses_dropout() -> None:
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(NotImplementedError, match=r"flash_attention_for_cpu: dropout_p=0.5.*MATH"):
        traced(aten._scaled_dot_product_flash_attention_for_cpu.default, q, q, q, 0.5, False)
