# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Recurrent networks where PyTorch's own decomposition is wrong.

``torch._decomp.decompositions._rnn_helper`` leaves out the dropout between layers: it asks ``num_layers < i - 1`` where
it means ``i < num_layers - 1``. Before torch 2.13, ``one_layer_lstm`` gives last states with an axis too many, unless
the batch is of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions


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
