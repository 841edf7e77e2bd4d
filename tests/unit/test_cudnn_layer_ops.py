# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A direction of a recurrent layer as cuDNN's op, where there is no cuDNN: against torch's layer, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from retrograd.frontend.layers.cudnn_layers import CUDNN_LSTM, CUDNN_RNN, GRU_MODE, RELU, TANH

STEPS, BATCH, FEATURES, WIDTH = 5, 2, 3, 4
LAYERS: dict[str, tuple[Callable[..., nn.Module], int, tuple[int, ...]]] = {
    "lstm": (partial(nn.LSTM, bidirectional=True), 4, ()),
    "gru": (partial(nn.GRU, bidirectional=True), 3, (GRU_MODE,)),
    "tanh": (partial(nn.RNN, bidirectional=True), 1, (TANH,)),
    "relu": (partial(nn.RNN, nonlinearity="relu", bidirectional=True), 1, (RELU,)),
}


def _operands(kind: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rows = LAYERS[kind][1] * WIDTH
    shapes = [(STEPS, BATCH, FEATURES), (rows, FEATURES), (rows, WIDTH), (rows,), (rows,)]
    shapes += [(BATCH, WIDTH)] * (2 if kind == "lstm" else 1)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def _run(kind: str, reverse: bool, *given: Tensor) -> Any:
    """The layer's results, without what cuDNN keeps."""
    op: Any = CUDNN_LSTM if kind == "lstm" else CUDNN_RNN
    return op(*given, *LAYERS[kind][2], reverse)[:-1]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_it_is_torchs(kind: str, reverse: bool) -> None:
    layer, operands = LAYERS[kind][0](FEATURES, WIDTH), _operands(kind)
    named = [f"{name}_l0{'_reverse' if reverse else ''}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    with torch.no_grad():
        for name, tensor in zip(named, operands[1:5], strict=True):
            getattr(layer, name).copy_(tensor)
        states = [torch.stack((t, t)) for t in operands[5:]]
        outputs, last = layer(operands[0], tuple(states) if kind == "lstm" else states[0])
        found = _run(kind, reverse, *operands)
    part = slice(WIDTH, None) if reverse else slice(WIDTH)
    lasts = last if kind == "lstm" else (last,)
    torch.testing.assert_close([*found], [outputs[..., part], *(state[int(reverse)] for state in lasts)])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_two_orders(kind: str, reverse: bool) -> None:
    operands = [t.requires_grad_() for t in _operands(kind, torch.float64)]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(_run(kind, reverse, *given))

    assert torch.autograd.gradcheck(run, operands)
    assert torch.autograd.gradgradcheck(run, operands, fast_mode=True)


@pytest.mark.parametrize("kind", LAYERS)
def test_results_are_as_large_as_traced(kind: str) -> None:
    op: Any = CUDNN_LSTM if kind == "lstm" else CUDNN_RNN
    real = op(*_operands(kind), *LAYERS[kind][2], False)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(t) for t in _operands(kind)), *LAYERS[kind][2], False)
    assert [t.shape for t in fake] == [t.shape for t in real]
    assert [t.dtype for t in fake] == [t.dtype for t in real]
