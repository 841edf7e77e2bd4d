# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Dropout between the layers of a recurrent network, which PyTorch's own decomposition leaves out.

``torch._decomp.decompositions._rnn_helper`` asks ``num_layers < i - 1`` where it means ``i < num_layers - 1``.
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
    """While this is open, LSTMs, GRUs and RNNs are traced with their dropout."""
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
            last += states
        return inputs.transpose(0, 1) if batch_first else inputs, last

    decompositions._rnn_helper = helper
    try:
        yield
    finally:
        decompositions._rnn_helper = original
