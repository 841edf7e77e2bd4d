# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Recurrent networks where PyTorch's own decomposition is wrong.

``torch._decomp.decompositions._rnn_helper`` leaves out the dropout between layers: it asks ``num_layers < i - 1`` where
it means ``i < num_layers - 1``. Before torch 2.13, ``one_layer_lstm`` gives last states with an axis too many, unless
the batch is of one. Cells of CUDA tensors are one op each, which cuDNN's relatives compute and nothing decomposes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decompositions
from torch.overrides import TorchFunctionMode


@contextmanager
def dropout_between_layers() -> Iterator[None]:
    """While this is open, LSTMs, GRUs and RNNs are traced with their dropout, and last states shaped as the first."""
    original: Callable[..., Any] = decompositions._rnn_helper

    def helper(
        inputs: Tensor,
        hidden: Sequence[Any],
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        layer: Callable[..., Any],
    ) -> tuple[Tensor, list[Any]]:
        inputs = inputs.transpose(0, 1) if batch_first else inputs
        directions = 2 if bidirectional else 1
        last: list[Any] = []
        for i in range(num_layers):
            if i and train:
                inputs = torch.dropout(inputs, dropout, train=True)
            own = slice(i * directions, (i + 1) * directions)
            inputs, states = original(
                inputs, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer
            )
            last += [_shaped(state, first) for state, first in zip(states, hidden[own], strict=True)]
        return inputs.transpose(0, 1) if batch_first else inputs, last

    decompositions._rnn_helper = helper
    try:
        yield
    finally:
        decompositions._rnn_helper = original


def _shaped(state: Any, first: Any) -> Any:
    """``state``, a tensor or a pair of them, in the shape of what it was at first."""
    if isinstance(state, Tensor):
        return state.reshape(first.shape)
    return tuple(_shaped(part, whole) for part, whole in zip(state, first, strict=True))


class PortableCells(TorchFunctionMode):
    """While it is active, ``lstm_cell`` and ``gru_cell`` of CUDA tensors are traced as their formulas."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        formula = _CELLS.get(func)
        if formula is not None and self.takes(args[0]):
            return formula(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def takes(inputs: Tensor) -> bool:
        """Whether a cell with these inputs is one op to PyTorch."""
        return inputs.is_cuda


def lstm_cell(
    inputs: Tensor,
    state: tuple[Tensor, Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``torch.nn.LSTMCell``'s formula: the next hidden and cell states, each (batch, hidden)."""
    hidden, cell = state
    gates = F.linear(inputs, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh)
    enter, forget, new, leave = gates.chunk(4, 1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def gru_cell(
    inputs: Tensor,
    hidden: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """``torch.nn.GRUCell``'s formula: the next hidden state, (batch, hidden)."""
    reset_i, update_i, new_i = F.linear(inputs, w_ih, b_ih).chunk(3, 1)
    reset_h, update_h, new_h = F.linear(hidden, w_hh, b_hh).chunk(3, 1)
    new = (new_i + (reset_i + reset_h).sigmoid() * new_h).tanh()
    return new + (update_i + update_h).sigmoid() * (hidden - new)


_CELLS: dict[Callable[..., Any], Callable[..., Any]] = {torch.lstm_cell: lstm_cell, torch.gru_cell: gru_cell}
