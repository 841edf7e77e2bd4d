# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One direction of one LSTM layer over all of its steps, as an op of its own, which compiled code has as a loop.

``retrograd::lstm`` takes the input's part of the gates for all steps, one product outside of it. Its gradient,
``retrograd::lstm_backward``, gives that of the gates for all steps, from which those of the input, of the weights and
of the biases are one product or sum each, ordinary ops again. The kernels here, in plain torch, are what eager runs;
``convert-recurrence-to-scf`` emits the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("retrograd", "FRAGMENT")
_LIBRARY.define(
    "lstm(Tensor gates, Tensor hidden, Tensor cell, Tensor weight) -> (Tensor, Tensor, Tensor, Tensor)",
)
_LIBRARY.define(
    "lstm_backward(Tensor grad_outputs, Tensor grad_last, Tensor cell, Tensor weight, Tensor cells, Tensor active)"
    " -> (Tensor, Tensor, Tensor)",
)


def lstm(gates: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run an LSTM over all steps, one or more.

    ``gates`` (steps, batch, 4 * width) is the input's part of the gates (enter, forget, new, leave) with all biases,
    ``hidden`` and ``cell`` (batch, width) are the first states, ``weight`` (4 * width, width) is the states' weight;
    all of one floating-point type. Gives hidden states (steps, batch, width), the last cell state (batch, width), and
    what the gradient needs: the cell states of all steps, and the gates after their sigmoids and tanh.
    """
    outputs, cells, active = [], [], []
    for step in gates:
        enter, forget, new, leave = (step + hidden @ weight.t()).chunk(4, -1)
        enter, forget, new, leave = enter.sigmoid(), forget.sigmoid(), new.tanh(), leave.sigmoid()
        cell = forget * cell + enter * new
        hidden = leave * cell.tanh()
        outputs.append(hidden)
        cells.append(cell)
        active.append(torch.cat((enter, forget, new, leave), -1))
    return torch.stack(outputs), cell.clone(), torch.stack(cells), torch.stack(active)


def lstm_backward(
    grad_outputs: Tensor, grad_last: Tensor, cell: Tensor, weight: Tensor, cells: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``gates``, ``hidden`` and ``cell`` of :func:`lstm`, from those of its first two results.

    Shapes are those of :func:`lstm`; ``cells`` and ``active`` are its last two results.
    """
    grad_hidden, grad_cell = torch.zeros_like(cell), grad_last
    grad_gates: list[Tensor] = []
    for number in reversed(range(len(active))):
        enter, forget, new, leave = active[number].chunk(4, -1)
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


def _fake_lstm(gates: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    states = gates.new_empty((gates.shape[0], *cell.shape))
    return states, torch.empty_like(cell), torch.empty_like(states), gates.new_empty(gates.shape)


def _fake_lstm_backward(
    grad_outputs: Tensor, grad_last: Tensor, cell: Tensor, weight: Tensor, cells: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return active.new_empty(active.shape), cell.new_empty(cell.shape), cell.new_empty(cell.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    outputs, _, cells, active = output
    ctx.save_for_backward(*inputs, outputs, cells, active)
    ctx.mark_non_differentiable(cells, active)


def _differentiate(ctx: Any, grad_outputs: Tensor, grad_last: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    gates, hidden, cell, weight, outputs, cells, active = ctx.saved_tensors
    if torch.is_grad_enabled():
        # The gradient is differentiated again: step by step, in ops that have derivatives of every order.
        given = [t.view_as(t) for t in (gates, hidden, cell, weight)]
        for tensor in given:
            if not tensor.requires_grad:
                tensor.requires_grad_()
        return torch.autograd.grad(lstm(*given)[:2], given, (grad_outputs, grad_last), create_graph=True)
    grad_gates, grad_hidden, grad_cell = LSTM_BACKWARD(grad_outputs, grad_last, cell, weight, cells, active)
    # One product over all steps.
    before = torch.cat((hidden.unsqueeze(0), outputs[:-1]))
    grad_weight = grad_gates.flatten(0, 1).t() @ before.flatten(0, 1)
    return grad_gates, grad_hidden, grad_cell, grad_weight


_LIBRARY.impl("lstm", lstm, "CompositeExplicitAutograd")
_LIBRARY.impl("lstm_backward", lstm_backward, "CompositeExplicitAutograd")
torch.library.register_fake("retrograd::lstm", _fake_lstm, lib=_LIBRARY)
torch.library.register_fake("retrograd::lstm_backward", _fake_lstm_backward, lib=_LIBRARY)
torch.library.register_autograd("retrograd::lstm", _differentiate, setup_context=_keep, lib=_LIBRARY)

LSTM = torch.ops.retrograd.lstm.default
LSTM_BACKWARD = torch.ops.retrograd.lstm_backward.default
