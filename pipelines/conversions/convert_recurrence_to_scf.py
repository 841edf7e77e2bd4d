# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``convert-recurrence-to-scf``: recurrent layers become loops over their steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from retrograd.dialects import ir
from retrograd.pipelines.analysis.read_graph import operator_name
from retrograd.pipelines.analysis.tensor_types import tensor_shape
from retrograd.pipelines.conversions.recurrence_forms import Sizes, lstm_backward_form, lstm_form
from retrograd.pipelines.functions import functions
from retrograd.pipelines.passes import ModulePass, PassFailure
from retrograd.pipelines.transforms.copies import copy_form

_FORMS = {"torch.retrograd.lstm": lstm_form, "torch.retrograd.lstm_backward": lstm_backward_form}
# The operand that says the sizes: gates of all steps.
_GATES = {"torch.retrograd.lstm": 0, "torch.retrograd.lstm_backward": 5}


@dataclass(frozen=True)
class ConvertRecurrenceToScf(ModulePass):
    """``retrograd.lstm`` and ``retrograd.lstm_backward`` become an ``scf.for`` over linalg on tensors.

    States are carried from step to step; what is kept of all steps is carried as well, and each step inserts its part,
    in place once bwd-isolate-loops has run.
    """

    name: ClassVar[str] = "convert-recurrence-to-scf"
    description: ClassVar[str] = "Turn recurrent layers into loops over their steps"

    def apply(self, module: ir.Operation) -> None:
        found = [
            view.operation
            for func in functions(module)
            for block in func.regions[0].blocks
            for view in block.operations
            if operator_name(view.operation) in _FORMS
        ]
        for op in found:
            convert_recurrence(op)


def convert_recurrence(op: ir.Operation) -> None:
    """Replace one op by its loop.

    Raises:
        PassFailure: a size is open, there is no step, or elements are not f32.
    """
    name = operator_name(op)
    form = ir.Module.parse(_FORMS[name](read_sizes(op, op.operands[_GATES[name]].type)))
    results: Sequence[ir.Value] = copy_form(form, list(op.operands), op)
    for old, new in zip(op.results, results, strict=True):
        old.replace_all_uses_with(new)
    op.erase()


def read_sizes(op: ir.Operation, gates: ir.Type) -> Sizes:
    """Steps, batch and width, from the type of the gates."""
    shape = tensor_shape(gates)
    if shape is None or len(shape) != 3 or None in shape or not str(gates).endswith(",f32>") or not shape[0]:
        message = f"convert-recurrence-to-scf: expected gates of f32, steps x batch x 4 * width, found {gates}"
        raise PassFailure(op, message, "leave other recurrent layers to be written out step by step")
    steps, batch, gates_wide = (int(n) for n in shape if n is not None)
    return Sizes(steps, batch, gates_wide // 4)
