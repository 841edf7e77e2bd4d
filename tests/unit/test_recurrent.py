# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is mended of PyTorch's decomposition of recurrent networks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import decompositions

from retrograd.frontend.layers.recurrent import PortableCells, cudnn_type, dropout_between_layers


def test_last_states_have_the_shape_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the decomposition gives them an axis too many, as before torch 2.13."""
    original: Callable[..., Any] = decompositions.one_layer_lstm

    def one_layer(*args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, (h, c) = original(*args, **kwargs)
        return out, (h.reshape(1, *h.shape[-2:]), c.reshape(1, *c.shape[-2:]))

    monkeypatch.setattr(decompositions, "one_layer_lstm", one_layer)
    lstm, x = (
        nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True),
        torch.randn(3, 6, 4, requires_grad=True),
    )
    first = (torch.randn(4, 3, 5), torch.randn(4, 3, 5))
    expected, states = lstm(x, first)
    with dropout_between_layers():
        found = decompositions.lstm_impl(x, first, lstm._flat_weights, True, 2, 0.0, True, True, True)
    for ours, theirs in zip(found, (expected, *states), strict=True):
        assert ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("bias", [True, False])
def test_cells_are_their_formulas(
    cell: type[nn.LSTMCell] | type[nn.GRUCell], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[torch.Size] = []

    def take(inputs: Tensor) -> bool:
        taken.append(inputs.shape)
        return True

    monkeypatch.setattr(PortableCells, "takes", staticmethod(take))
    module = cell(3, 4, bias=bias)
    x, states = torch.randn(2, 3), [torch.randn(2, 4) for _ in range(2)]
    state = (states[0], states[1]) if cell is nn.LSTMCell else states[0]
    expected = module(x, state)
    with PortableCells():
        found = module(x, state)
    assert taken == [x.shape]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("of_autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float16),
        (torch.float64, torch.float64),
    ],
)
def test_autocast_hands_cudnn_float16(own: torch.dtype, expected: torch.dtype, of_autocast: torch.dtype) -> None:
    """Whatever autocast's own type is, as eager does; float64 stays."""
    tensor = torch.zeros(1, dtype=own)
    assert cudnn_type(tensor) is own
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", of_autocast)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert cudnn_type(tensor) is expected
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
