# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A layer of an LSTM, a GRU or an RNN as one op: against torch's own layer, and its gradients of two orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import decompositions
from torch.utils._pytree import tree_leaves

from retrograd.frontend.layers.recurrence_ops import GRU, LEAST_STEPS, LSTM, RNN_RELU, RNN_TANH
from retrograd.frontend.layers.recurrent import can_be_loop, dropout_between_layers, recurrent_loops
from retrograd.options import Request


def _lstm(*operands: Tensor) -> tuple[Tensor, ...]:
    return tuple(LSTM(*operands)[:2])


def _gru(*operands: Tensor) -> Tensor:
    outputs: Tensor = GRU(*operands)[0]
    return outputs


def _rnn_tanh(*operands: Tensor) -> Tensor:
    outputs: Tensor = RNN_TANH(*operands)
    return outputs


def _rnn_relu(*operands: Tensor) -> Tensor:
    outputs: Tensor = RNN_RELU(*operands)
    return outputs


SHAPES: dict[Callable[..., Any], Callable[[int, int, int], list[tuple[int, ...]]]] = {
    _lstm: lambda steps, batch, width: [(steps, batch, 4 * width), (batch, width), (batch, width), (4 * width, width)],
    _gru: lambda steps, batch, width: [(steps, batch, 3 * width), (batch, width), (3 * width, width), (3 * width,)],
    _rnn_tanh: lambda steps, batch, width: [(steps, batch, width), (batch, width), (width, width)],
    _rnn_relu: lambda steps, batch, width: [(steps, batch, width), (batch, width), (width, width)],
}


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("layer", SHAPES)
def test_gradients_of_two_orders(layer: Callable[..., Any], steps: int) -> None:
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES[layer](steps, 2, 3)]
    assert torch.autograd.gradcheck(layer, operands)
    assert torch.autograd.gradgradcheck(layer, operands, fast_mode=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_layers_are_torchs(kind: str, bias: bool, batch_first: bool) -> None:
    name, _, bend = kind.partition("_")
    named = {"nonlinearity": bend} if bend else {}
    layer = getattr(nn, name.upper())(4, 5, 2, bidirectional=True, bias=bias, batch_first=batch_first, **named)
    shape = (3, LEAST_STEPS, 4) if batch_first else (LEAST_STEPS, 3, 4)
    x = torch.randn(shape, requires_grad=True)
    first = [torch.randn(4, 3, 5, requires_grad=True) for _ in range(2 if kind == "lstm" else 1)]
    states = tuple(first) if kind == "lstm" else first[0]
    expected = tree_leaves(layer(x, states))
    formula = getattr(decompositions, f"{kind}_input" if bend else f"{kind}_impl")
    with dropout_between_layers(), recurrent_loops(True):
        found = list(formula(x, states, layer._flat_weights, bias, 2, 0.0, True, True, batch_first))
    assert f"retrograd_{kind}" in _history(found[-1])
    by = [x, *first, *layer.parameters()]
    weights = [torch.randn_like(t) for t in expected]
    theirs = torch.autograd.grad(expected, by, weights)
    ours = torch.autograd.grad(found, by, weights)
    torch.testing.assert_close((*found, *ours), (*expected, *theirs), atol=1e-5, rtol=1e-4)


def _history(tensor: Tensor) -> str:
    """Names of the nodes that a tensor was computed by."""
    names, open_ = set(), [tensor.grad_fn]
    while open_:
        node = open_.pop()
        if node is not None and node not in names:
            names.add(node)
            open_ += [n for n, _ in node.next_functions]
    return " ".join(str(node) for node in names)


def test_which_layers_are_loops() -> None:
    x, state, weights = torch.randn(LEAST_STEPS, 2, 3), torch.randn(2, 4), [torch.randn(16, 3), torch.randn(16, 4)]
    assert not can_be_loop(x, (state, state), weights, False)
    with recurrent_loops(True):
        _check_choice(x, state, weights)


def _check_choice(x: Tensor, state: Tensor, weights: list[Tensor]) -> None:
    assert can_be_loop(x, (state, state), weights, False)
    assert not can_be_loop(x[1:], (state, state), weights, False)
    assert not can_be_loop(x[:, :0], (state[:0], state[:0]), weights, False)
    assert not can_be_loop(x, (state, state), [*weights, torch.randn(2, 4)], False)
    assert not can_be_loop(x, (state, state[:1]), weights, False)
    assert not can_be_loop(x.double(), (state, state), weights, False)
    with torch.autocast("cpu"):
        assert not can_be_loop(x, (state, state), weights, False)
    taken: list[bool] = []

    def ask(t: Tensor) -> Tensor:
        taken.append(can_be_loop(t, (state, state), weights, False))
        return t

    torch.func.vmap(ask)(x[None])
    assert taken == [False]


@pytest.mark.parametrize(
    ("target", "given", "loops"),
    [
        ("cpu", {}, True),
        ("cpu", {"partition": "default"}, True),
        ("cpu", {"partition": "budget", "memory_budget": 0.9}, False),
        ("vulkan", {}, False),
        (("cpu", "vulkan"), {}, False),
    ],
)
def test_loops_are_for_a_cpu_alone_and_not_under_a_budget(target: Any, given: dict[str, Any], loops: bool) -> None:
    assert Request(target, **given).on([torch.ones(1)]).loops is loops
