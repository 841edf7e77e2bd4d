# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ops written as functions, in text, which passes put in the place of others."""

from __future__ import annotations

from collections.abc import Sequence

from retrograd.dialects import ir


def copy_body(form: ir.Module, arguments: Sequence[ir.Value], op: ir.Operation) -> list[ir.Value]:
    """Put copies of the ops of the one function of ``form``, called with ``arguments``, in front of ``op``; gives what
    the function returns."""
    (body,) = form.body.operations[0].regions[0].blocks
    values: dict[ir.Value, ir.Value] = dict(zip(body.arguments, arguments, strict=True))
    *inner, end = (view.operation for view in body.operations)
    ip = ir.InsertionPoint(op)
    for template in inner:
        copy = template.clone(ip)
        for i, operand in enumerate(template.operands):
            copy.operands[i] = values[operand]
        values |= dict(zip(template.results, copy.results, strict=True))
    return [values[operand] for operand in end.operands]
