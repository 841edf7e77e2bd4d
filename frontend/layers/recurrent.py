# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Recurrent networks: LSTMs, GRUs and RNNs as loops, and what PyTorch's own decomposition has wrong.

While :func:`recurrent_loops` is open, a direction of such a layer of ``LEAST_STEPS`` or more is one op
(``recurrence_ops.py``), which is compiled as a loop; others are written out, an op by step. Of an LSTM it is the op
that oneDNN computes (``lstm_layers.py``) where libraries compute anything on a CPU; of all kinds the one that cuDNN
computes (``cudnn_layers.py``) where they do on CUDA.

``torch._decomp.decompositions._rnn_helper`` leaves out the dropout between layers: it asks ``num_layers < i - 1`` where
it means ``i < num_layers - 1``. Before torch 2.13, ``one_layer_lstm`` gives last states with an axis too many, unless
the batch is of one. Cells of CUDA tensors are one op each, which cuDNN's relatives compute and nothing decomposes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._decomp import decompositions
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from retrograd.frontend.layers.cudnn_layers import CUDNN_LSTM, CUDNN_RNN, GRU_MODE, LSTM_MODE, RELU, TANH, is_in_cudnn
from retrograd.frontend.layers.lstm_layers import LSTM_LAYER, is_in_onednn
from retrograd.frontend.layers.recurrence_ops import GRU, LEAST_STEPS, LSTM, RNN_RELU, RNN_TANH
from retrograd.frontend.libraries.ops import computes

_HAS_LOOPS: ContextVar[bool] = ContextVar("retrograd_recurrent_loops", default=False)


@contextmanager
def recurrent_loops(are_wanted: bool) -> Iterator[None]:
    """While this is open, traces have layers as loops that can be, or none if they are not wanted."""
    token = _HAS_LOOPS.set(are_wanted)
    try:
        yield
    finally:
        _HAS_LOOPS.reset(token)


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
                inputs, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, step_or_loop(layer)
            )
            last += [_shaped(state, first) for state, first in zip(states, hidden[own], strict=True)]
        return inputs.transpose(0, 1) if batch_first else inputs, last

    decompositions._rnn_helper = helper
    try:
        yield
    finally:
        decompositions._rnn_helper = original


def step_or_loop(layer: Callable[..., Any]) -> Callable[..., Any]:
    """``layer``, one direction of a layer in PyTorch's decomposition, as a loop where it can be one."""
    mode = _find_mode(layer)
    if mode is None:
        return layer
    loop = _LOOPS[mode]

    def layer_or_loop(
        inputs: Tensor, states: Any, params: Sequence[Tensor], has_biases: bool, reverse: bool = False
    ) -> tuple[Tensor, Any]:
        first = (states,) if isinstance(states, Tensor) else states
        if can_be_cudnn_call(mode, inputs, first, params, has_biases):
            return _cudnn_call(mode, inputs, states, params, reverse)
        if mode == LSTM_MODE and can_be_call(inputs, first, params, has_biases):
            return _lstm_call(inputs, states, params, reverse)
        if not can_be_loop(inputs, first, params, has_biases):
            return layer(inputs, states, params, has_biases, reverse=reverse)
        outputs, last = loop(inputs.flip(0) if reverse else inputs, states, params)
        return outputs.flip(0) if reverse else outputs, last

    return layer_or_loop


def _lstm_loop(
    inputs: Tensor, states: tuple[Tensor, Tensor], params: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    bias = params[2] + params[3] if len(params) == 4 else None
    outputs, cell, _, _ = LSTM(F.linear(inputs, params[0], bias), states[0], states[1], params[1])
    return outputs, (outputs[-1], cell)


def _lstm_call(
    inputs: Tensor, states: tuple[Tensor, Tensor], params: Sequence[Tensor], reverse: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    outputs, hidden, cell, _ = LSTM_LAYER(inputs, *_with_biases(params), *states, reverse)
    return outputs, (hidden, cell)


def _cudnn_call(mode: int, inputs: Tensor, states: Any, params: Sequence[Tensor], reverse: bool) -> tuple[Tensor, Any]:
    dtype = cudnn_type(inputs)
    x, weights = inputs.to(dtype), [tensor.to(dtype) for tensor in _with_biases(params)]
    if mode == LSTM_MODE:
        outputs, hidden, cell, _ = CUDNN_LSTM(x, *weights, *(state.to(dtype) for state in states), reverse)
        return outputs, (hidden, cell)
    outputs, hidden, _ = CUDNN_RNN(x, *weights, states.to(dtype), mode, reverse)
    return outputs, hidden


def cudnn_type(tensor: Tensor) -> torch.dtype:
    """The type in which cuDNN is given a tensor of a layer: under autocast float16, whatever autocast's own is, as
    eager has it; float64 stays."""
    if not torch.is_autocast_enabled("cuda") or tensor.dtype is torch.float64:
        return tensor.dtype
    return torch.float16


def _with_biases(params: Sequence[Tensor]) -> list[Tensor]:
    """Both weights and both biases, which are zero where a layer has none."""
    return [*params] if len(params) > 2 else [*params, *[params[0].new_zeros(params[0].shape[0])] * 2]


def _gru_loop(inputs: Tensor, hidden: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    of_input, of_state = params[2:] if len(params) == 4 else (None, params[1].new_zeros(params[1].shape[0]))
    outputs, _ = GRU(F.linear(inputs, params[0], of_input), hidden, params[1], of_state)
    return outputs, outputs[-1]


def _find_mode(layer: Callable[..., Any]) -> int | None:
    """cuDNN's number of a kind of layer; ``None`` for what is none."""
    if layer is decompositions.one_layer_lstm:
        return LSTM_MODE
    cell = layer.keywords.get("hidden_fn") if isinstance(layer, partial) else None
    if cell is decompositions.gru_cell:
        return GRU_MODE
    if cell is None or getattr(cell, "__qualname__", "") != f"{decompositions.rnn_cell.__qualname__}.<locals>.inner":
        return None
    return _SQUASHED.get(inspect.getclosurevars(cell).nonlocals.get("nonlinearity"))


def _rnn_loop(
    op: Callable[..., Tensor], inputs: Tensor, hidden: Tensor, params: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    bias = params[2] + params[3] if len(params) == 4 else None
    outputs = op(F.linear(inputs, params[0], bias), hidden, params[1])
    return outputs, outputs[-1]


_SQUASHED: dict[Any, int] = {torch.tanh: TANH, torch.relu: RELU}
_LOOPS: dict[int, Callable[..., tuple[Tensor, Any]]] = {
    RELU: partial(_rnn_loop, RNN_RELU),
    TANH: partial(_rnn_loop, RNN_TANH),
    LSTM_MODE: _lstm_loop,
    GRU_MODE: _gru_loop,
}


def can_be_loop(inputs: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool) -> bool:
    """Whether one direction of a layer is compiled as a loop: where it can be an op, of ``LEAST_STEPS`` or more."""
    return can_be_op(inputs, states, params, has_biases) and inputs.shape[0] >= LEAST_STEPS


def can_be_call(inputs: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool) -> bool:
    """Whether oneDNN computes one direction of an LSTM's layer: where it can be an op, and a library is faster."""
    return (
        is_in_onednn(inputs)
        and can_be_op(inputs, states, params, has_biases)
        and computes(LSTM_LAYER, inputs, *params[:2])
    )


def can_be_cudnn_call(
    mode: int, inputs: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool
) -> bool:
    """Whether cuDNN computes one direction of a layer, of a kind that ``mode`` says."""
    op = CUDNN_LSTM if mode == LSTM_MODE else CUDNN_RNN
    return (
        inputs.is_cuda
        and _is_plain(inputs, states, params, has_biases)
        and all(cudnn_type(tensor) is cudnn_type(inputs) for tensor in (*states, *params))
        and all(is_in_cudnn(tensor) for tensor in (inputs, *states, *params))
        and computes(op, inputs, *params[:2])
    )


def can_be_op(inputs: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool) -> bool:
    """Whether one direction of a layer is one op: where loops are wanted, in f32 on a CPU."""
    return (
        _HAS_LOOPS.get()
        and not torch.is_autocast_enabled("cpu")
        and all(t.dtype is torch.float32 and t.device.type == "cpu" for t in (inputs, *states, *params))
        and _is_plain(inputs, states, params, has_biases)
    )


def _is_plain(inputs: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool) -> bool:
    """Whether sizes are known, and there is no projection. Of states for another batch, a library would read past the
    end."""
    # Transforms of torch.func and forward derivatives have rules for ordinary ops alone.
    is_transformed = peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return (
        not is_transformed
        and len(params) == (4 if has_biases else 2)
        and all(isinstance(n, int) for t in (inputs, *states, *params) for n in t.shape)
        and inputs.numel() > 0
        and all(state.shape == (inputs.shape[1], params[1].shape[1]) for state in states)
    )


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
    inputs: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """``torch.nn.GRUCell``'s formula: the next hidden state, (batch, hidden)."""
    reset_i, update_i, new_i = F.linear(inputs, w_ih, b_ih).chunk(3, 1)
    reset_h, update_h, new_h = F.linear(hidden, w_hh, b_hh).chunk(3, 1)
    new = (new_i + (reset_i + reset_h).sigmoid() * new_h).tanh()
    return new + (update_i + update_h).sigmoid() * (hidden - new)


_CELLS: dict[Callable[..., Any], Callable[..., Any]] = {torch.lstm_cell: lstm_cell, torch.gru_cell: gru_cell}
