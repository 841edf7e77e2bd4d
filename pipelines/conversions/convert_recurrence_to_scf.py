# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``convert-recurrence-to-scf``: recurrent layers become loops over their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import tensor_shape
from retrograd.pipelines.analysis.partition.read_graph import find_operators, operator_name
from retrograd.pipelines.conversions.recurrence_forms import (
    gru_backward_form,
    gru_form,
    lstm_backward_form,
    lstm_form,
    rnn_relu_backward_form,
    rnn_relu_form,
    rnn_tanh_backward_form,
    rnn_tanh_form,
)
from retrograd.pipelines.conversions.recurrence_text import Sizes
from retrograd.pipelines.infra.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.helpers.copies import copy_form


@dataclass(frozen=True)
class _Layer:
    """The loop of an op, and which operand says the sizes: so many states' or gates' features of all steps."""

    form: Callable[[Sizes], str]
    operand: int
    gates: int


_LAYERS = {
    "torch.retrograd.lstm": _Layer(lstm_form, 0, 4),
    "torch.retrograd.lstm_backward": _Layer(lstm_backward_form, 4, 1),
    "torch.retrograd.gru": _Layer(gru_form, 0, 3),
    "torch.retrograd.gru_backward": _Layer(gru_backward_form, 3, 1),
    "torch.retrograd.rnn_tanh": _Layer(rnn_tanh_form, 0, 1),
    "torch.retrograd.rnn_tanh_backward": _Layer(rnn_tanh_backward_form, 0, 1),
    "torch.retrograd.rnn_relu": _Layer(rnn_relu_form, 0, 1),
    "torch.retrograd.rnn_relu_backward": _Layer(rnn_relu_backward_form, 0, 1),
}


class ConvertRecurrenceToScf(ModulePass):
    """Layers of LSTMs, GRUs and RNNs, ops of ``retrograd``, and their backwards become an ``scf.for`` each, over linalg
    on tensors.

    States are carried from step to step; what is kept of all steps is carried as well, and each step inserts its part,
    in place once bwd-isolate-loops has run.
    """

    description = "Turn recurrent layers into loops over their steps"

    def apply(self, module: ir.Operation) -> None:
        for op in find_operators(module, _LAYERS):
            convert_recurrence(op)


def convert_recurrence(op: ir.Operation) -> None:
    """Replace one op by its loop.

    Raises:
        PassFailure: a size is open, there is no step, or elements are not f32.
    """
    layer = _LAYERS[operator_name(op)]
    form = ir.Module.parse(layer.form(read_sizes(op, op.operands[layer.operand].type, layer.gates)))
    results: Sequence[ir.Value] = copy_form(form, list(op.operands), op)
    for old, new in zip(op.results, results, strict=True):
        old.replace_all_uses_with(new)
    op.erase()


def read_sizes(op: ir.Operation, gates: ir.Type, count: int) -> Sizes:
    """Steps, batch and width, from the type of so many gates of all steps, or of states."""
    shape = tensor_shape(gates)
    if shape is None or len(shape) != 3 or None in shape or not str(gates).endswith(",f32>") or not shape[0]:
        message = f"convert-recurrence-to-scf: expected f32, steps x batch x {count} * width, found {gates}"
        raise PassFailure(op, message, "leave other recurrent layers to be written out step by step")
    steps, batch, gates_wide = (int(n) for n in shape if n is not None)
    return Sizes(steps, batch, gates_wide // count)
