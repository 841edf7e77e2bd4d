# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One direction of one recurrent layer over all of its steps, as an op, which compiled code has as a loop.

``retrograd::lstm``, ``retrograd::gru``, ``retrograd::rnn_tanh`` and ``retrograd::rnn_relu`` take the input's part of
the gates for all steps, one product outside of them. Their gradients, ``retrograd::lstm_backward`` and so on, give that
of the gates for all steps, from which those of the input, of the weights and of the biases are one product or sum each,
ordinary ops again. The kernels here, in plain torch, are what eager runs; ``convert-recurrence-to-scf`` emits the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.layers.own_ops import define_op

# Fewer steps are written out: IREE then computes with whatever fuses, and there is not much to compile.
LEAST_STEPS = 4


def lstm(gates: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run an LSTM over all steps, one or more.

    ``gates`` (steps, batch, 4 * width) is the input's part of the gates (enter, forget, new, leave) with all biases,
    ``hidden`` and ``cell`` (batch, width) are the first states, ``weight`` (4 * width, width) is the states' weight;
    all of one floating-point type. Gives hidden states (steps, batch, width), the last cell state (batch, width), and
    what the gradient needs: the cell states of all steps, and (steps, 4, batch, width) the gates after their sigmoids
    and tanh.
    """
    outputs, cells, active = [], [], []
    for step in gates:
        enter, forget, new, leave = (step + hidden @ weight.t()).chunk(4, -1)
        enter, forget, new, leave = enter.sigmoid(), forget.sigmoid(), new.tanh(), leave.sigmoid()
        cell = forget * cell + enter * new
        hidden = leave * cell.tanh()
        outputs.append(hidden)
        cells.append(cell)
        active.append(torch.stack((enter, forget, new, leave)))
    return torch.stack(outputs), cell.clone(), torch.stack(cells), torch.stack(active)


def lstm_backward(
    grad_outputs: Tensor, grad_last: Tensor, cell: Tensor, weight: Tensor, cells: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``gates``, ``hidden`` and ``cell`` of :func:`lstm`, from those of its first two results. Shapes are
    those of :func:`lstm`; ``cells`` and ``active`` are its last two results."""
    grad_hidden, grad_cell = torch.zeros_like(cell), grad_last
    grad_gates: list[Tensor] = []
    for number in reversed(range(len(active))):
        enter, forget, new, leave = active[number]
        squashed = cells[number].tanh()
        before = cells[number - 1] if number else cell
        grad_hidden = grad_hidden + grad_outputs[number]
        grad_cell = grad_cell + grad_hidden * leave * (1 - squashed * squashed)
        step = torch.cat(
            (
                grad_cell * new * enter * (1 - enter),
                grad_cell * before * forget * (1 - forget),
                grad_cell * enter * (1 - new * new),
                grad_hidden * squashed * leave * (1 - leave),
            ),
            -1,
        )
        grad_gates.append(step)
        grad_hidden = step @ weight
        grad_cell = grad_cell * forget
    return torch.stack(grad_gates[::-1]), grad_hidden, grad_cell.clone()


def gru(gates: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Run a GRU over all steps, one or more.

    ``gates`` (steps, batch, 3 * width) is the input's part of the gates (reset, update, new) with its biases,
    ``hidden`` (batch, width) is the first state, ``weight`` (3 * width, width) is the states' weight and ``bias``
    (3 * width) theirs; all of one floating-point type. Gives hidden states (steps, batch, width), and what the gradient
    needs (steps, 4, batch, width): the gates after their sigmoids and tanh, and the state's part of the new ones.
    """
    outputs, active = [], []
    for step in gates:
        reset_i, update_i, new_i = step.chunk(3, -1)
        reset_h, update_h, inner = (hidden @ weight.t() + bias).chunk(3, -1)
        reset, update = (reset_i + reset_h).sigmoid(), (update_i + update_h).sigmoid()
        new = (new_i + reset * inner).tanh()
        hidden = new + update * (hidden - new)
        outputs.append(hidden)
        active.append(torch.stack((reset, update, new, inner)))
    return torch.stack(outputs), torch.stack(active)


def gru_backward(
    grad_outputs: Tensor, hidden: Tensor, weight: Tensor, states: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the states' part of the gates, of the input's part of the new ones, and of ``hidden`` of
    :func:`gru`, from that of its first result. That of the input's part of the other gates is that of the states' part.

    Shapes are those of :func:`gru`; ``states`` and ``active`` are its results.
    """
    grad = torch.zeros_like(hidden)
    grad_gates: list[Tensor] = []
    grad_new: list[Tensor] = []
    for number in reversed(range(len(active))):
        reset, update, new, inner = active[number]
        before = states[number - 1] if number else hidden
        grad = grad + grad_outputs[number]
        step = (grad - grad * update) * (1 - new * new)
        of_update = grad * (before - new) * update * (1 - update)
        of_reset = step * inner * reset * (1 - reset)
        grad_gates.append(torch.cat((of_reset, of_update, step * reset), -1))
        grad_new.append(step)
        grad = grad * update + grad_gates[-1] @ weight
    return torch.stack(grad_gates[::-1]), torch.stack(grad_new[::-1]), grad


def _rnn_tanh(sums: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    return run_rnn(torch.tanh, sums, hidden, weight)


def _rnn_relu(sums: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    return run_rnn(torch.relu, sums, hidden, weight)


def run_rnn(bend: Callable[[Tensor], Tensor], sums: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """Hidden states (steps, batch, width) of an RNN: of ``sums``, shaped so, the input's part with all biases, of the
    first state ``hidden`` (batch, width) and the states' ``weight`` (width, width)."""
    outputs = []
    for step in sums:
        hidden = bend(step + hidden @ weight.t())
        outputs.append(hidden)
    return torch.stack(outputs)


def rnn_tanh_backward(grad_outputs: Tensor, weight: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the sums and of the first hidden state of an RNN with tanh, from that of its ``states``."""
    return _run_rnn_backward(lambda grad, state: grad * (1 - state * state), grad_outputs, weight, states)


def rnn_relu_backward(grad_outputs: Tensor, weight: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """The same of one with ReLU."""
    return _run_rnn_backward(lambda grad, state: grad.masked_fill(state <= 0, 0), grad_outputs, weight, states)


def _run_rnn_backward(
    through: Callable[[Tensor, Tensor], Tensor], grad_outputs: Tensor, weight: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the sums and of the first hidden state of an RNN, from that of its ``states``."""
    grad = torch.zeros_like(states[0])
    grad_sums: list[Tensor] = []
    for number in reversed(range(len(states))):
        grad_sums.append(through(grad + grad_outputs[number], states[number]))
        grad = grad_sums[-1] @ weight
    return torch.stack(grad_sums[::-1]), grad


def _fake_lstm(gates: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    states = gates.new_empty((gates.shape[0], *cell.shape))
    active = gates.new_empty((gates.shape[0], 4, *cell.shape))
    return states, torch.empty_like(cell), torch.empty_like(states), active


def _fake_lstm_backward(
    grad_outputs: Tensor, grad_last: Tensor, cell: Tensor, weight: Tensor, cells: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gates = active.new_empty((*cells.shape[:2], weight.shape[0]))
    return gates, cell.new_empty(cell.shape), cell.new_empty(cell.shape)


def _fake_gru(gates: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    steps, (batch, width) = gates.shape[0], hidden.shape
    return gates.new_empty((steps, batch, width)), gates.new_empty((steps, 4, batch, width))


def _fake_gru_backward(
    grad_outputs: Tensor, hidden: Tensor, weight: Tensor, states: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gates = active.new_empty((*states.shape[:2], weight.shape[0]))
    return gates, active.new_empty(states.shape), hidden.new_empty(hidden.shape)


def _fake_rnn(sums: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    return sums.new_empty(sums.shape)


def _fake_rnn_backward(grad_outputs: Tensor, weight: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    return states.new_empty(states.shape), states.new_empty(states.shape[1:])


def written_out_gradients(
    formula: Callable[..., tuple[Tensor, ...]], given: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradient of ``given`` by way of a layer's first results, step by step: in ops that have derivatives of every
    order, where it is differentiated again."""
    leaves = [t.view_as(t) for t in given]
    for tensor in leaves:
        if not tensor.requires_grad:
            tensor.requires_grad_()
    results = formula(*leaves)[: len(gradients)]
    return torch.autograd.grad(results, leaves, gradients, create_graph=True)


def weight_gradient(grad_gates: Tensor, hidden: Tensor, outputs: Tensor) -> Tensor:
    """The gradient of the states' weight: one product over all steps."""
    before = torch.cat((hidden.unsqueeze(0), outputs[:-1]))
    return grad_gates.flatten(0, 1).t() @ before.flatten(0, 1)


def _keep_lstm(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    outputs, _, cells, active = output
    ctx.save_for_backward(*inputs, outputs, cells, active)
    ctx.mark_non_differentiable(cells, active)


def _keep_gru(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate_lstm(ctx: Any, grad_outputs: Tensor, grad_last: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    gates, hidden, cell, weight, outputs, cells, active = ctx.saved_tensors
    if torch.is_grad_enabled():
        return written_out_gradients(lstm, (gates, hidden, cell, weight), (grad_outputs, grad_last))
    grad_gates, grad_hidden, grad_cell = LSTM_BACKWARD(grad_outputs, grad_last, cell, weight, cells, active)
    return grad_gates, grad_hidden, grad_cell, weight_gradient(grad_gates, hidden, outputs)


def _differentiate_gru(ctx: Any, grad_outputs: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    gates, hidden, weight, bias, outputs, active = ctx.saved_tensors
    if torch.is_grad_enabled():
        return written_out_gradients(gru, (gates, hidden, weight, bias), (grad_outputs,))
    of_states, grad_new, grad_hidden = GRU_BACKWARD(grad_outputs, hidden, weight, outputs, active)
    grad_gates = torch.cat((of_states[..., : 2 * hidden.shape[-1]], grad_new), -1)
    return grad_gates, grad_hidden, weight_gradient(of_states, hidden, outputs), of_states.sum((0, 1))


def _keep_rnn(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _differentiate_rnn(name: str, ctx: Any, grad_outputs: Tensor) -> tuple[Tensor, ...]:
    sums, hidden, weight, outputs = ctx.saved_tensors
    formula, backward = (_rnn_tanh, RNN_TANH_BACKWARD) if name == "tanh" else (_rnn_relu, RNN_RELU_BACKWARD)
    if torch.is_grad_enabled():
        return written_out_gradients(lambda *given: (formula(*given),), (sums, hidden, weight), (grad_outputs,))
    grad_sums, grad_hidden = backward(grad_outputs, weight, outputs)
    return grad_sums, grad_hidden, weight_gradient(grad_sums, hidden, outputs)


_TWO, _THREE, _FOUR = (f"({', '.join(['Tensor'] * count)})" for count in (2, 3, 4))
LSTM = define_op(
    f"lstm(Tensor gates, Tensor hidden, Tensor cell, Tensor weight) -> {_FOUR}",
    *(lstm, _fake_lstm, _differentiate_lstm, _keep_lstm),
)
LSTM_BACKWARD = define_op(
    "lstm_backward(Tensor grad_outputs, Tensor grad_last, Tensor cell, Tensor weight, Tensor cells, Tensor active)"
    f" -> {_THREE}",
    *(lstm_backward, _fake_lstm_backward),
)
GRU = define_op(
    f"gru(Tensor gates, Tensor hidden, Tensor weight, Tensor bias) -> {_TWO}",
    *(gru, _fake_gru, _differentiate_gru, _keep_gru),
)
GRU_BACKWARD = define_op(
    f"gru_backward(Tensor grad_outputs, Tensor hidden, Tensor weight, Tensor states, Tensor active) -> {_THREE}",
    *(gru_backward, _fake_gru_backward),
)
_FORWARD = "(Tensor sums, Tensor hidden, Tensor weight) -> Tensor"
_BACKWARD = f"(Tensor grad_outputs, Tensor weight, Tensor states) -> {_TWO}"
RNN_TANH = define_op(f"rnn_tanh{_FORWARD}", _rnn_tanh, _fake_rnn, partial(_differentiate_rnn, "tanh"), _keep_rnn)
RNN_TANH_BACKWARD = define_op(f"rnn_tanh_backward{_BACKWARD}", rnn_tanh_backward, _fake_rnn_backward)
RNN_RELU = define_op(f"rnn_relu{_FORWARD}", _rnn_relu, _fake_rnn, partial(_differentiate_rnn, "relu"), _keep_rnn)
RNN_RELU_BACKWARD = define_op(f"rnn_relu_backward{_BACKWARD}", rnn_relu_backward, _fake_rnn_backward)
