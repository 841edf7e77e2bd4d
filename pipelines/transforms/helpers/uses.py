# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which ops take a value, and having one take another."""

from __future__ import annotations

from retrograd.dialects import ir


def only_user(value: ir.Value) -> ir.Operation | None:
    """The op that alone uses ``value``, once."""
    uses = list(value.uses)
    return uses[0].owner if len(uses) == 1 else None


def replace_operand(op: ir.Operation, old: ir.Value, new: ir.Value) -> None:
    """Have ``op`` take ``new`` wherever it took ``old``."""
    for number, value in enumerate(op.operands):
        if value == old:
            op.operands[number] = new
