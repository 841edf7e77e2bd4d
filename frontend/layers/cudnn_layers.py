# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One direction of an LSTM's, GRU's or RNN's layer over all of its steps as one call of cuDNN's, as eager runs it.

``retrograd::cudnn_lstm`` and ``retrograd::cudnn_rnn`` are ``aten._cudnn_rnn`` of one layer, with the size of what cuDNN
keeps for the backward, which PyTorch's fake tensors have as none: cuDNN is asked for it once for each size, by running
the layer. Where no library computes anything, in a file for one, the layers are written out step by step.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.layers.lstm_layers import LSTM_LAYER, run_layer, run_layer_backward
from retrograd.frontend.layers.own_ops import define_op
from retrograd.frontend.layers.recurrence_ops import (
    gru,
    gru_backward,
    lstm,
    lstm_backward,
    rnn_relu_backward,
    rnn_tanh_backward,
    run_rnn,
    weight_gradient,
    written_out_gradients,
)

aten = torch.ops.aten

RELU, TANH, LSTM_MODE, GRU_MODE = range(4)
"""cuDNN's numbers of kinds of layers, by which :func:`rnn_layer` takes them."""
_GATES = {RELU: 1, TANH: 1, LSTM_MODE: 4, GRU_MODE: 3}
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_WEIGHTS = 4
_ARGUMENTS = "Tensor x, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, Tensor hidden"
_GRADIENTS = "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor"


def is_in_cudnn(tensor: Tensor) -> bool:
    """Whether cuDNN computes a layer of such tensors."""
    return tensor.is_cuda and tensor.dtype in _DTYPES and torch.backends.cudnn.is_available()


# -- Calls ------------------------------------------------------------------------------------------------------------


def lstm_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, hidden: Tensor, cell: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run one direction of an LSTM's layer.

    ``x`` (steps, batch, features), first states (batch, width), weights as those of ``torch.nn.LSTM``, all of one type.
    Gives hidden states (steps, batch, width), the last hidden and cell states (batch, width), and what the backward is
    to be handed, bytes of cuDNN's own.
    """
    if not is_in_cudnn(x):
        *results, _ = write_out_lstm(x, w_ih, w_hh, b_ih, b_hh, hidden, cell, reverse)
        return results[0], results[1], results[2], x.new_zeros(1, dtype=torch.uint8)
    outputs, last, last_cell, reserve = _call(x, (w_ih, w_hh, b_ih, b_hh), (hidden, cell), LSTM_MODE, reverse)
    return outputs, last, last_cell, reserve


def rnn_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, hidden: Tensor, mode: int, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of a GRU's layer or an RNN's, which ``mode`` says and which have no cell states."""
    if not is_in_cudnn(x):
        *results, _ = write_out_rnn(x, w_ih, w_hh, b_ih, b_hh, hidden, mode, reverse)
        return results[0], results[1], x.new_zeros(1, dtype=torch.uint8)
    outputs, last, reserve = _call(x, (w_ih, w_hh, b_ih, b_hh), (hidden,), mode, reverse)
    return outputs, last, reserve


def lstm_layer_backward(*given: Any) -> tuple[Tensor, ...]:
    """Gradients of the first seven arguments of :func:`lstm_layer`; ``given`` are those, the hidden states, gradients
    of the first three results, the bytes of cuDNN's and ``reverse``."""
    if not is_in_cudnn(given[0]):
        return write_out_lstm_backward(*given)
    x, w_ih, w_hh, b_ih, b_hh, hidden, cell, outputs, grad_outputs, grad_hidden, grad_cell, reserve, reverse = given
    weights, gradients = (w_ih, w_hh, b_ih, b_hh), (grad_outputs, grad_hidden, grad_cell)
    return _call_backward(x, weights, (hidden, cell), outputs, gradients, reserve, LSTM_MODE, reverse)


def rnn_layer_backward(*given: Any) -> tuple[Tensor, ...]:
    """Gradients of the first six arguments of :func:`rnn_layer`, as :func:`lstm_layer_backward` gives them; ``mode``
    stands before ``reverse``."""
    if not is_in_cudnn(given[0]):
        return write_out_rnn_backward(*given)
    x, w_ih, w_hh, b_ih, b_hh, hidden, outputs, grad_outputs, grad_hidden, reserve, mode, reverse = given
    gradients = (grad_outputs, grad_hidden)
    return _call_backward(x, (w_ih, w_hh, b_ih, b_hh), (hidden,), outputs, gradients, reserve, mode, reverse)


def _call(
    x: Tensor, weights: Sequence[Tensor], states: Sequence[Tensor], mode: int, reverse: bool
) -> tuple[Tensor, ...]:
    """Hidden states, the last states, of which there are as many as first ones, and what cuDNN keeps."""
    given = x.flip(0) if reverse else x.contiguous()
    hidden, cell = [*(state.unsqueeze(0).contiguous() for state in states), None][:2]
    width = weights[1].shape[1]
    parts, packed = _pack(weights, mode)
    outputs, last, last_cell, reserve, _ = aten._cudnn_rnn.default(
        *(given, parts, _WEIGHTS, packed, hidden, cell), *(mode, width, 0, 1, False, 0.0, True, False, [], None)
    )
    last_states = [state.squeeze(0) for state in (last, last_cell)[: len(states)]]
    return outputs.flip(0) if reverse else outputs, *last_states, reserve


def _call_backward(
    x: Tensor,
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    outputs: Tensor,
    gradients: Sequence[Tensor],
    reserve: Tensor,
    mode: int,
    reverse: bool,
) -> tuple[Tensor, ...]:
    width = weights[1].shape[1]
    needed = reserve_bytes(mode, x.dtype, x.device, *x.shape, width)
    if reserve.numel() != needed:
        raise RuntimeError(
            f"cuDNN takes {needed} bytes of its forward here and was given {reserve.numel()}: the forward ran on "
            "another device, or with another release of cuDNN"
        )
    given, found, grad = (t.flip(0) if reverse else t.contiguous() for t in (x, outputs, gradients[0]))
    hidden, cell = [*(state.unsqueeze(0).contiguous() for state in states), None][:2]
    grad_hidden, grad_cell = [*(gradient.unsqueeze(0).contiguous() for gradient in gradients[1:]), None][:2]
    parts, packed = _pack(weights, mode)
    wanted = [True, True, cell is not None, True]
    # cuDNN writes to what its forward kept, which a second backward is to find as it was.
    of_x, of_hidden, of_cell, of_weights = aten._cudnn_rnn_backward.default(
        *(given, parts, _WEIGHTS, packed, hidden, cell, found, grad, grad_hidden, grad_cell),
        *(mode, width, 0, 1, False, 0.0, True, False, [], None, reserve.clone(), wanted),
    )
    of_states = [of_state.squeeze(0) for of_state in (of_hidden, of_cell)[: len(states)]]
    return of_x.flip(0) if reverse else of_x, *of_weights, *of_states


def _pack(weights: Sequence[Tensor], mode: int) -> tuple[list[Tensor], Tensor]:
    """The weights as parts of one tensor, as cuDNN takes them, and that tensor."""
    width, features = weights[1].shape[1], weights[0].shape[1]
    # The tensors given become parts of it: not those of the caller.
    parts = [weight.detach().contiguous().view_as(weight) for weight in weights]
    packed = aten._cudnn_rnn_flatten_weight.default(parts, _WEIGHTS, features, mode, width, 0, 1, False, False)
    return parts, packed


@lru_cache(maxsize=256)
def reserve_bytes(
    mode: int, dtype: torch.dtype, device: torch.device, steps: int, batch: int, features: int, width: int
) -> int:
    """How many bytes cuDNN keeps of a layer for its backward."""
    if device.type != "cuda" or not torch.backends.cudnn.is_available():
        return 1
    rows = _GATES[mode] * width
    with torch.no_grad(), _disable_current_modes():
        make = partial(torch.zeros, dtype=dtype, device=device)
        weights = make(rows, features), make(rows, width), make(rows), make(rows)
        states = [make(batch, width)] * (2 if mode == LSTM_MODE else 1)
        return _call(make(steps, batch, features), weights, states, mode, False)[-1].numel()


# -- Written out ------------------------------------------------------------------------------------------------------


def write_out_lstm(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, hidden: Tensor, cell: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`lstm_layer` in ops that are compiled."""
    return *run_layer(lstm, (x, w_ih, w_hh, b_ih, b_hh, hidden, cell), reverse), x.new_zeros(1, dtype=torch.uint8)


def write_out_rnn(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, hidden: Tensor, mode: int, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`rnn_layer` in ops that are compiled."""
    given = x.flip(0) if reverse else x
    if mode == GRU_MODE:
        outputs, _ = gru(F.linear(given, w_ih, b_ih), hidden, w_hh, b_hh)
    else:
        squash = torch.tanh if mode == TANH else torch.relu
        outputs = run_rnn(squash, F.linear(given, w_ih, b_ih + b_hh), hidden, w_hh)
    last = outputs[-1].clone()
    return outputs.flip(0) if reverse else outputs, last, x.new_zeros(1, dtype=torch.uint8)


def write_out_lstm_backward(*given: Any) -> tuple[Tensor, ...]:
    """:func:`lstm_layer_backward` in ops that are compiled: of the forward, which is run once more."""
    *tensors, _outputs, grad_outputs, grad_hidden, grad_cell, _reserve, reverse = given
    gradients = (grad_outputs, grad_hidden, grad_cell)
    of_x, of_ih, of_hh, of_bias, *of_states = run_layer_backward(lstm, lstm_backward, tensors, gradients, reverse)
    return of_x, of_ih, of_hh, of_bias, of_bias.clone(), *of_states


def write_out_rnn_backward(*given: Any) -> tuple[Tensor, ...]:
    """:func:`rnn_layer_backward` in ops that are compiled: of the forward, which is run once more."""
    x, w_ih, w_hh, b_ih, b_hh, hidden, _outputs, grad_outputs, grad_hidden, _reserve, mode, reverse = given
    x, grad = (t.flip(0) if reverse else t for t in (x, grad_outputs))
    grad = torch.cat((grad[:-1], (grad[-1] + grad_hidden).unsqueeze(0)))
    # Of the input's and of the state's part of the gates: in a GRU they are not the same.
    if mode == GRU_MODE:
        outputs, active = gru(F.linear(x, w_ih, b_ih), hidden, w_hh, b_hh)
        of_gates, of_new, of_hidden = gru_backward(grad, hidden, w_hh, outputs, active)
        of_input = torch.cat((of_gates[..., : 2 * hidden.shape[1]], of_new), -1)
    else:
        squash, run_backward = (torch.tanh, rnn_tanh_backward) if mode == TANH else (torch.relu, rnn_relu_backward)
        outputs = run_rnn(squash, F.linear(x, w_ih, b_ih + b_hh), hidden, w_hh)
        of_gates, of_hidden = run_backward(grad, w_hh, outputs)
        of_input = of_gates
    of_x, of_ih = of_input @ w_ih, of_input.flatten(0, 1).t() @ x.flatten(0, 1)
    of_x = of_x.flip(0) if reverse else of_x
    of_hh = weight_gradient(of_gates, hidden, outputs)
    return of_x, of_ih, of_hh, of_input.sum((0, 1)), of_gates.sum((0, 1)), of_hidden


# -- Registration -----------------------------------------------------------------------------------------------------


def _fake_lstm(*given: Any) -> tuple[Tensor, ...]:
    x, hidden, cell = given[0], given[5], given[6]
    return *_fake_states(x, hidden), cell.new_empty(cell.shape), _fake_reserve(x, hidden, LSTM_MODE)


def _fake_rnn(*given: Any) -> tuple[Tensor, ...]:
    x, hidden, mode = given[0], given[5], given[6]
    return *_fake_states(x, hidden), _fake_reserve(x, hidden, mode)


def _fake_states(x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:2], hidden.shape[1])), hidden.new_empty(hidden.shape)


def _fake_reserve(x: Tensor, hidden: Tensor, mode: int) -> Tensor:
    size = reserve_bytes(mode, x.dtype, x.device, *x.shape, hidden.shape[1])
    return x.new_empty(size, dtype=torch.uint8)


def _fake_backward(count: int, *given: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in given[:count])


def _keep(count: int, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """``count`` of the inputs are tensors, the others say how."""
    ctx.how, ctx.count = inputs[count:], count
    ctx.save_for_backward(*inputs[:count], output[0], output[-1])
    ctx.mark_non_differentiable(output[-1])


def _differentiate(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
    *saved, reserve = ctx.saved_tensors
    is_lstm = ctx.count == 7
    if torch.is_grad_enabled():
        # Written out, it can be differentiated again.
        run: Any = write_out_lstm if is_lstm else write_out_rnn
        found = written_out_gradients(lambda *leaves: run(*leaves, *ctx.how), saved[: ctx.count], gradients[:-1])
    else:
        run = CUDNN_LSTM_BACKWARD if is_lstm else CUDNN_RNN_BACKWARD
        found = run(*saved, *gradients[:-1], reserve, *ctx.how)
    return *found, *[None] * len(ctx.how)


_BACKWARD = "Tensor outputs, Tensor grad_outputs, Tensor grad_hidden"
CUDNN_LSTM = define_op(
    f"cudnn_lstm({_ARGUMENTS}, Tensor cell, bool reverse) -> (Tensor, Tensor, Tensor, Tensor)",
    *(lstm_layer, _fake_lstm, _differentiate, partial(_keep, 7)),
)
CUDNN_LSTM_BACKWARD = define_op(
    f"cudnn_lstm_backward({_ARGUMENTS}, Tensor cell, {_BACKWARD}, Tensor grad_cell, Tensor reserve, bool reverse)"
    f" -> ({_GRADIENTS}, Tensor)",
    *(lstm_layer_backward, partial(_fake_backward, 7)),
)
CUDNN_RNN = define_op(
    f"cudnn_rnn({_ARGUMENTS}, int mode, bool reverse) -> (Tensor, Tensor, Tensor)",
    *(rnn_layer, _fake_rnn, _differentiate, partial(_keep, 6)),
)
CUDNN_RNN_BACKWARD = define_op(
    f"cudnn_rnn_backward({_ARGUMENTS}, {_BACKWARD}, Tensor reserve, int mode, bool reverse) -> ({_GRADIENTS})",
    *(rnn_layer_backward, partial(_fake_backward, 6)),
)
CUDNN_LAYERS = (CUDNN_LSTM, CUDNN_LSTM_BACKWARD, CUDNN_RNN, CUDNN_RNN_BACKWARD)
"""All ops of this file."""
_REASON = "it is a library's, which a file has none of"
ENTRIES = (
    Decomposition(CUDNN_LSTM, write_out_lstm, _REASON),
    Decomposition(CUDNN_LSTM_BACKWARD, write_out_lstm_backward, _REASON),
    Decomposition(CUDNN_RNN, write_out_rnn, _REASON),
    Decomposition(CUDNN_RNN_BACKWARD, write_out_rnn_backward, _REASON),
)

_NOTES: dict[Any, int] = {LSTM_LAYER: 3, CUDNN_LSTM: 3, CUDNN_RNN: 2}


def is_workspace(node: Node) -> bool:
    """Whether a value of a graph is what a library keeps of a layer for its backward: bytes that are alike in no two
    runs whose arguments are not."""
    if node.target is not operator.getitem:
        return False
    source, place = node.args
    return isinstance(source, Node) and _NOTES.get(source.target) == place
