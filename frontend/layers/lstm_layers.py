# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One direction of an LSTM's layer over all of its steps as one call of oneDNN's, as eager runs it on a CPU.

``retrograd::lstm_layer`` is ``aten.mkldnn_rnn_layer`` with the size of its workspace, which PyTorch's fake tensors have
as none: oneDNN is asked for it once for each size, by running the layer. Where no library computes anything, in a file
for one, both ops are written out in those of ``recurrence_ops.py``; the backward then has the forward once more, which
``bwd-cse`` finds to be there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.layers.own_ops import define_op
from retrograd.frontend.layers.recurrence_ops import (
    LEAST_STEPS,
    LSTM,
    LSTM_BACKWARD,
    lstm,
    lstm_backward,
    weight_gradient,
    written_out_gradients,
)

aten = torch.ops.aten

_MODE = 2  # oneDNN's number of an LSTM
_ARGUMENTS = "Tensor x, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, Tensor hidden, Tensor cell"
_RESULTS = "Tensor outputs, Tensor last_hidden, Tensor last_cell"


def is_in_onednn(tensor: Tensor) -> bool:
    """Whether oneDNN computes a layer of such tensors."""
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and torch.backends.mkldnn.is_available()


def lstm_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, hidden: Tensor, cell: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run one direction of a layer.

    ``x`` (steps, batch, features), first states (batch, width), weights as those of ``torch.nn.LSTM``. Gives hidden
    states (steps, batch, width), the last hidden and cell states (batch, width), and what the backward is to be
    handed, bytes of oneDNN's own; zeros in types that it does not compute.
    """
    if not is_in_onednn(x):
        *results, _ = write_out_layer(x, w_ih, w_hh, b_ih, b_hh, hidden, cell, reverse)
        workspace = x.new_zeros(workspace_bytes(*x.shape, hidden.shape[1]), dtype=torch.uint8)
        return results[0], results[1], results[2], workspace
    return _run_onednn((x, w_ih, w_hh, b_ih, b_hh, hidden, cell), reverse)


def _run_onednn(given: Sequence[Tensor], reverse: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The layer of these tensors, the arguments of :func:`lstm_layer`, by oneDNN."""
    dense = [t.contiguous() for t in given]
    # It gives a workspace where gradients are on, which they are in no island; none is recorded of it.
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        found: tuple[Tensor, Tensor, Tensor, Tensor] = aten.mkldnn_rnn_layer.default(
            *dense, reverse, [], _MODE, dense[5].shape[1], 1, True, False, False, True
        )
    return found


def lstm_layer_backward(
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    hidden: Tensor,
    cell: Tensor,
    outputs: Tensor,
    last_hidden: Tensor,
    last_cell: Tensor,
    grad_outputs: Tensor,
    grad_hidden: Tensor,
    grad_cell: Tensor,
    workspace: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``x``, of both weights, of either bias and of the first states of :func:`lstm_layer`, from those of
    its first three results."""
    given = (x, w_ih, w_hh, b_ih, b_hh, hidden, cell)
    gradients = (grad_outputs, grad_hidden, grad_cell)
    if not is_in_onednn(x):
        return write_out_backward(*given, outputs, last_hidden, last_cell, *gradients, workspace, reverse)
    needed = workspace_bytes(*x.shape, hidden.shape[1])
    if workspace.numel() != needed:
        raise RuntimeError(
            f"oneDNN's LSTM takes a workspace of {needed} bytes here and was given {workspace.numel()}: its forward "
            "ran on another CPU, or in another release"
        )
    dense = [t.contiguous() for t in (*given, outputs, last_hidden, last_cell, *gradients)]
    width = hidden.shape[1]
    of_x, of_ih, of_hh, of_bias, _, of_hidden, of_cell = aten.mkldnn_rnn_layer_backward.default(
        *dense, reverse, _MODE, width, 1, True, True, False, [], False, workspace.contiguous()
    )
    return of_x, of_ih, of_hh, of_bias, of_hidden.reshape(hidden.shape), of_cell.reshape(cell.shape)


@lru_cache(maxsize=256)
def workspace_bytes(steps: int, batch: int, features: int, width: int) -> int:
    """How large oneDNN's workspace is for a layer."""
    shapes = [(steps, batch, features), (4 * width, features), (4 * width, width)]
    shapes += [(4 * width,), (4 * width,), (batch, width), (batch, width)]
    with torch.no_grad(), _disable_current_modes():
        zeros = [torch.zeros(shape, device="cpu") for shape in shapes]
        return _run_onednn(zeros, False)[3].numel()


# -- Written out ------------------------------------------------------------------------------------------------------


def _gates(x: Tensor, w_ih: Tensor, b_ih: Tensor, b_hh: Tensor, reverse: bool) -> Tensor:
    """The input's part of the gates, in the order of the steps as they are run."""
    gates = F.linear(x, w_ih, b_ih + b_hh)
    return gates.flip(0) if reverse else gates


def write_out_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, hidden: Tensor, cell: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`lstm_layer` in ops that are compiled, with a workspace that nothing is in."""
    run = LSTM if x.shape[0] >= LEAST_STEPS else lstm
    return *run_layer(run, (x, w_ih, w_hh, b_ih, b_hh, hidden, cell), reverse), x.new_zeros(0, dtype=torch.uint8)


def run_layer(run: Callable[..., Any], tensors: Sequence[Tensor], reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs and the last states of a layer whose steps ``run`` runs."""
    x, w_ih, w_hh, b_ih, b_hh, hidden, cell = tensors
    outputs, last, _, _ = run(_gates(x, w_ih, b_ih, b_hh, reverse), hidden, cell, w_hh)
    return outputs.flip(0) if reverse else outputs, outputs[-1].clone(), last


def write_out_backward(
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    hidden: Tensor,
    cell: Tensor,
    _outputs: Tensor,
    _last_hidden: Tensor,
    _last_cell: Tensor,
    grad_outputs: Tensor,
    grad_hidden: Tensor,
    grad_cell: Tensor,
    _workspace: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`lstm_layer_backward` in ops that are compiled: of the forward, which is run once more."""
    run, run_backward = (LSTM, LSTM_BACKWARD) if x.shape[0] >= LEAST_STEPS else (lstm, lstm_backward)
    tensors, gradients = (x, w_ih, w_hh, b_ih, b_hh, hidden, cell), (grad_outputs, grad_hidden, grad_cell)
    return run_layer_backward(run, run_backward, tensors, gradients, reverse)


def run_layer_backward(
    run: Callable[..., Any],
    run_backward: Callable[..., Any],
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor],
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of a layer's input, weights, biases and states by those of its outputs and last states; ``run``
    runs its steps once more, ``run_backward`` those of the backward."""
    x, w_ih, w_hh, b_ih, b_hh, hidden, cell = tensors
    grad_outputs, grad_hidden, grad_cell = gradients
    outputs, _, cells, active = run(_gates(x, w_ih, b_ih, b_hh, reverse), hidden, cell, w_hh)
    given = grad_outputs.flip(0) if reverse else grad_outputs
    given = torch.cat((given[:-1], (given[-1] + grad_hidden).unsqueeze(0)))
    grad_gates, of_hidden, of_cell = run_backward(given, grad_cell, cell, w_hh, cells, active)
    of_hh = weight_gradient(grad_gates, hidden, outputs)
    grad_gates = grad_gates.flip(0) if reverse else grad_gates
    rows = grad_gates.flatten(0, 1)
    return grad_gates @ w_ih, rows.t() @ x.flatten(0, 1), of_hh, rows.sum(0), of_hidden, of_cell


# -- Registration -----------------------------------------------------------------------------------------------------


def _fake(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, hidden: Tensor, cell: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = hidden.shape[1]
    size = workspace_bytes(*x.shape, width)
    states = x.new_empty((*x.shape[:2], width))
    return states, hidden.new_empty(hidden.shape), cell.new_empty(cell.shape), x.new_empty(size, dtype=torch.uint8)


def _fake_backward(*given: Any) -> tuple[Tensor, ...]:
    x, w_ih, w_hh, b_ih, _, hidden, cell = given[:7]
    return tuple(t.new_empty(t.shape) for t in (x, w_ih, w_hh, b_ih, hidden, cell))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.reverse = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[3])


def _differentiate(ctx: Any, grad_outputs: Tensor, grad_hidden: Tensor, grad_cell: Tensor, _: Any) -> tuple[Any, ...]:
    gradients = (grad_outputs, grad_hidden, grad_cell)
    # Written out, it can be differentiated again.
    run = _differentiable_backward if torch.is_grad_enabled() else LSTM_LAYER_BACKWARD
    *saved, workspace = ctx.saved_tensors
    of_x, of_ih, of_hh, of_bias, of_hidden, of_cell = run(*saved, *gradients, workspace, ctx.reverse)
    return of_x, of_ih, of_hh, of_bias, of_bias, of_hidden, of_cell, None


def _differentiable_backward(*given: Any) -> tuple[Tensor, ...]:
    x, w_ih, w_hh, b_ih, b_hh, hidden, cell = given[:7]
    *gradients, _, reverse = given[10:]

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        x, w_ih, w_hh, b_ih, hidden, cell = leaves
        outputs, last_cell, _, _ = lstm(_gates(x, w_ih, b_ih, b_hh, reverse), hidden, cell, w_hh)
        return outputs.flip(0) if reverse else outputs, outputs[-1], last_cell

    return written_out_gradients(run, (x, w_ih, w_hh, b_ih, hidden, cell), gradients)


LSTM_LAYER = define_op(
    f"lstm_layer({_ARGUMENTS}, bool reverse) -> (Tensor, Tensor, Tensor, Tensor)",
    *(lstm_layer, _fake, _differentiate, _keep),
)
LSTM_LAYER_BACKWARD = define_op(
    f"lstm_layer_backward({_ARGUMENTS}, {_RESULTS}, Tensor grad_outputs, Tensor grad_hidden, Tensor grad_cell, "
    "Tensor workspace, bool reverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    *(lstm_layer_backward, _fake_backward),
)
_REASON = "it is a library's, which a file has none of"
ENTRIES = (
    Decomposition(LSTM_LAYER, write_out_layer, _REASON),
    Decomposition(LSTM_LAYER_BACKWARD, write_out_backward, _REASON),
)
