# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Attention with dropout: one mask for both halves, that which dropout of the weights would draw, and its gradients."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from retrograd.frontend.doors.capture import CapturedGraph, capture_joint
from retrograd.frontend.layers import dropped_attention
from retrograd.frontend.layers.dropped_attention import (
    ATTENTION,
    ATTENTION_BACKWARD,
    ATTENTION_BACKWARD_WITH_MASK,
    attention,
)
from retrograd.frontend.layers.random_ops import UNIFORM, uniform
from retrograd.frontend.libraries.ops import NO_LIBRARIES, library_ops

SEED = torch.tensor([0x0123456789ABCDEF, -5])


def make_heads(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, *rest, 8, dtype=dtype).requires_grad_() for rest in ((4, 5), (2, 7), (2, 7)))
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor, kept: Tensor, mask: Tensor | None) -> Tensor:
    """The formula, with a mask of weights that was read out."""
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / 8**0.5 + (0 if mask is None else mask)
    scores = scores.masked_fill(torch.ones(5, 7, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) * kept / 0.75 @ v


@pytest.mark.parametrize("most", [1, 3 * 35, 1 << 22], ids=["a head", "three", "all"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_gradients_are_those_of_the_mask_read_out(masked: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many heads are computed at a time."""
    monkeypatch.setattr(dropped_attention, "_MOST_SCORES", most)
    heads, mask = make_heads(), torch.randn(5, 7, dtype=torch.float64) if masked else None
    kept = uniform(SEED, 3, (2, 4, 5, 7)) >= 0.25
    output, lse = ATTENTION(*heads, 0.25, True, mask, None, SEED, 3)
    exact = attend(*heads, kept, mask)
    tangent = torch.randn_like(exact)
    assert torch.allclose(output, exact) and lse.shape == (2, 4, 5) and not lse.requires_grad
    found, right = (torch.autograd.grad(value, heads, tangent) for value in (output, exact))
    assert all(torch.allclose(mine, other) for mine, other in zip(found, right, strict=True))


@pytest.mark.parametrize("shape", [(5, 7), (4, 1, 7), (1, 4, 5, 7), (2, 1, 5, 1)], ids=str)
@pytest.mark.parametrize("most", [35, 1 << 22], ids=["a head", "all"])
def test_a_mask_has_its_gradient(most: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed over the axes along which it is the same."""
    monkeypatch.setattr(dropped_attention, "_MOST_SCORES", most)
    heads, mask = make_heads(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    exact = attend(*heads, uniform(SEED, 3, (2, 4, 5, 7)) >= 0.25, mask)
    output, _ = ATTENTION(*heads, 0.25, True, mask, None, SEED, 3)
    tangent = torch.randn_like(exact)
    found, right = (torch.autograd.grad(value, (*heads, mask), tangent) for value in (output, exact))
    assert all(torch.allclose(mine, other) for mine, other in zip(found, right, strict=True))
    given = (tangent, *heads, output, torch.randn(2, 4, 5), 0.25, True, mask, None, SEED, 3)
    fake = torch.library.opcheck(ATTENTION_BACKWARD_WITH_MASK, given, test_utils="test_faketensor")
    assert set(fake.values()) == {"SUCCESS"}


def test_half_types_are_computed_in_f32() -> None:
    heads = make_heads(torch.bfloat16)
    output, lse = attention(*heads, 0.25, False, None, 0.5, SEED, 0)
    assert output.dtype == torch.bfloat16 and lse.dtype == torch.float32
    fake = torch.library.opcheck(ATTENTION, (*heads, 0.25, False, None, 0.5, SEED, 0), test_utils="test_faketensor")
    assert set(fake.values()) == {"SUCCESS"}


def trace(*kernels: str, dropout: float = 0.25) -> CapturedGraph:
    """Two calls of attention with dropout, and dropout of the result, traced for kernels of these families."""

    def model(q: Tensor, k: Tensor) -> Tensor:
        inner = F.scaled_dot_product_attention(q, k, k, dropout_p=dropout)
        return F.dropout(F.scaled_dot_product_attention(inner, k, k, is_causal=True, dropout_p=dropout), 0.5)

    args = [torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(2)]
    with ExitStack() as stack, library_ops(replace(NO_LIBRARIES, kernels=kernels)):
        return capture_joint(stack, model, args, None)


def calls(captured: CapturedGraph, target: Any) -> list[torch.fx.Node]:
    return list(captured.graph_module.graph.find_nodes(op="call_function", target=target))


def test_a_trace_keeps_it_whole_for_kernels_and_both_halves_draw_from_one_stream() -> None:
    captured = trace("attention")
    forward, backward = calls(captured, ATTENTION), calls(captured, ATTENTION_BACKWARD)
    assert [node.args[8] for node in forward] == [0, 1]
    assert [node.args[11] for node in backward] == [1, 0]
    assert [node.args[1] for node in calls(captured, UNIFORM)] == [2]
    # Of one seed.
    assert len({node.args[7] for node in forward} | {node.args[10] for node in backward}) == 1


def test_a_trace_keeps_it_whole_where_the_mask_has_a_gradient() -> None:
    def model(q: Tensor, bias: Tensor) -> Tensor:
        inner = F.scaled_dot_product_attention(q, q, q, attn_mask=bias, dropout_p=0.25)
        return F.scaled_dot_product_attention(inner, q, q, attn_mask=bias, dropout_p=0.25)

    args = [torch.randn(2, 4, 6, 8, requires_grad=True), torch.randn(1, 4, 6, 6, requires_grad=True)]
    with ExitStack() as stack, library_ops(replace(NO_LIBRARIES, kernels=("attention",))):
        captured = capture_joint(stack, model, args, None)
    assert [node.args[8] for node in calls(captured, ATTENTION)] == [0, 1]
    assert [node.args[11] for node in calls(captured, ATTENTION_BACKWARD_WITH_MASK)] == [1, 0]
    assert not calls(captured, ATTENTION_BACKWARD)


def test_elsewhere_its_weights_are_written_out() -> None:
    for captured in (trace("products"), trace("attention", dropout=1.0)):
        assert not calls(captured, ATTENTION)


def test_the_mask_is_that_of_weights_written_out() -> None:
    """The same function of the seed, whichever way it is traced."""
    q, k = (torch.randn(2, 4, 6, 8) for _ in range(2))
    whole, apart = trace("attention"), trace("products")
    outputs = []
    for captured in (whole, apart):
        torch.manual_seed(3)
        found, gradients = captured.graph_module([q, k], [torch.ones(2, 4, 6, 8)])
        outputs.append([*found, *gradients])
    for mine, other in zip(*outputs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-5)
