# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Copies of ops that take other values: of a body, or of a *form*, ops written as a function in text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from retrograd.dialects import ir
from retrograd.pipelines.infra.functions import functions, only_block
from retrograd.pipelines.transforms.helpers.barriers import walk


def copy_ops(
    ops: Iterable[ir.Operation], values: dict[ir.Value, ir.Value], ip: ir.InsertionPoint
) -> list[ir.Operation]:
    """Copies of ``ops`` that take ``values[v]`` where there is one for what they took; adds their results to it."""
    copies = []
    for op in ops:
        copy = op.clone(ip=ip).operation
        for number, operand in enumerate(op.operands):
            copy.operands[number] = values.get(operand, operand)
        # What a body takes from outside of it.
        for inner in (inner for region in copy.regions for block in region.blocks for inner in walk(block)):
            for number, operand in enumerate(inner.operands):
                if operand in values:
                    inner.operands[number] = values[operand]
        values |= dict(zip(op.results, copy.results, strict=True))
        copies.append(copy)
    return copies


def copy_block(block: ir.Block, arguments: Sequence[ir.Value], ip: ir.InsertionPoint) -> list[ir.Value]:
    """Put copies of the ops of ``block``, less its terminator, at ``ip``, with ``arguments`` for its first ones; gives
    what the terminator takes."""
    values: dict[ir.Value, ir.Value] = dict(zip(block.arguments, arguments, strict=False))
    *ops, end = (view.operation for view in block.operations)
    copy_ops(ops, values, ip)
    return [values.get(operand, operand) for operand in end.operands]


def copy_form(form: ir.Module, arguments: Sequence[ir.Value], op: ir.Operation) -> list[ir.Value]:
    """Put copies of the ops of the one function of ``form``, called with ``arguments``, in front of ``op``; gives what
    the function returns."""
    (block,) = form.body.operations[0].regions[0].blocks
    return copy_block(block, arguments, ir.InsertionPoint(op))


def replace_by_form(op: ir.Operation, form: ir.Module) -> None:
    """Put what ``form`` makes of the operands of ``op`` in the place of its result."""
    (value,) = copy_form(form, list(op.operands), op)
    op.results[0].replace_all_uses_with(value)
    op.erase()


def replace_by_forms(module: ir.Operation, pass_name: str, form_of: Callable[[ir.Operation], str | None]) -> None:
    """Replace each op of a module's functions, in bodies too, for which ``form_of`` gives the text of a form; each text
    is parsed once.

    Raises:
        PassFailure: a function of several blocks; names the pass.
    """
    ops = (op for func in functions(module) for op in walk(only_block(func, pass_name)))
    found = [(op, form) for op in ops if (form := form_of(op)) is not None]
    parsed = {form: ir.Module.parse(form) for form in dict.fromkeys(form for _, form in found)}
    for op, form in found:
        replace_by_form(op, parsed[form])
