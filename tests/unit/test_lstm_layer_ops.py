# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One direction of an LSTM's layer as an op: against torch's own layer, its gradients, and what it hands over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from retrograd.frontend.layers.lstm_layers import (
    LSTM_LAYER,
    LSTM_LAYER_BACKWARD,
    workspace_bytes,
    write_out_backward,
    write_out_layer,
)
from retrograd.frontend.layers.recurrence_ops import LEAST_STEPS

FORWARD: Callable[..., Any] = write_out_layer
BACKWARD: Callable[..., Any] = write_out_backward
STEPS, BATCH, FEATURES, WIDTH = LEAST_STEPS + 1, 2, 3, 4


def _operands(dtype: torch.dtype = torch.float32, steps: int = STEPS) -> list[Tensor]:
    shapes = [(steps, BATCH, FEATURES), (4 * WIDTH, FEATURES), (4 * WIDTH, WIDTH), (4 * WIDTH,), (4 * WIDTH,)]
    shapes += [(BATCH, WIDTH)] * 2
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("reverse", [False, True])
def test_it_is_torchs(reverse: bool) -> None:
    layer, operands = nn.LSTM(FEATURES, WIDTH, bidirectional=True), _operands()
    named = [f"{name}_l0{'_reverse' if reverse else ''}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    with torch.no_grad():
        for name, tensor in zip(named, operands[1:5], strict=True):
            getattr(layer, name).copy_(tensor)
        states = [torch.stack((t, t)) for t in operands[5:]]
        outputs, (hidden, cell) = layer(operands[0], tuple(states))
        found = LSTM_LAYER(*operands, reverse)
    part = slice(WIDTH, None) if reverse else slice(WIDTH)
    torch.testing.assert_close([*found[:3]], [outputs[..., part], hidden[int(reverse)], cell[int(reverse)]])


@pytest.mark.parametrize("steps", [1, STEPS])
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_two_orders(reverse: bool, steps: int) -> None:
    operands = [t.requires_grad_() for t in _operands(torch.float64, steps)]

    def layer(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(LSTM_LAYER(*given, reverse)[:3])

    assert torch.autograd.gradcheck(layer, operands)
    assert torch.autograd.gradgradcheck(layer, operands, fast_mode=True)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [1, STEPS])
def test_written_out_it_is_onednns(reverse: bool, steps: int) -> None:
    operands: Any = _operands(steps=steps)
    *results, workspace = LSTM_LAYER(*operands, reverse)
    torch.testing.assert_close([*FORWARD(*operands, reverse)[:3]], results)
    gradients = [torch.randn_like(t) for t in results]
    expected = LSTM_LAYER_BACKWARD(*operands, *results, *gradients, workspace, reverse)
    given: Any = (*operands, *results, *gradients, workspace)
    found = BACKWARD(*given, reverse)
    torch.testing.assert_close([*found], [*expected])


def test_the_workspace_is_as_large_as_traced() -> None:
    real = LSTM_LAYER(*_operands(), False)[3]
    with FakeTensorMode() as mode:
        fake = LSTM_LAYER(*(mode.from_tensor(t) for t in _operands()), False)[3]
    assert fake.shape == real.shape == (workspace_bytes(STEPS, BATCH, FEATURES, WIDTH),)


def test_no_other_workspace_is_read() -> None:
    """oneDNN would read past its end."""
    operands = _operands()
    *results, workspace = LSTM_LAYER(*operands, False)
    with pytest.raises(RuntimeError, match="was given"):
        LSTM_LAYER_BACKWARD(*operands, *results, *results, workspace[1:], False)
