# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The functions of a module, as every pass looks for them."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.infra.passes import PassFailure


def find_function(module: ir.Operation, name: str) -> ir.Operation | None:
    """The ``func.func`` called ``name`` at the top of a module."""
    for op in module.regions[0].blocks[0].operations:
        if op.operation.name == "func.func" and ir.StringAttr(op.operation.attributes["sym_name"]).value == name:
            return op.operation
    return None


def functions(module: ir.Operation) -> list[ir.Operation]:
    """The ``func.func`` ops of a module that have a body."""
    ops = [op.operation for op in module.regions[0].blocks[0].operations]
    return [op for op in ops if op.name == "func.func" and len(op.regions[0].blocks)]


def only_block(func: ir.Operation, pass_name: str) -> ir.Block:
    """The block of a function that has one.

    Raises:
        PassFailure: it has several; names the pass.
    """
    blocks = list(func.regions[0].blocks)
    if len(blocks) != 1:
        raise PassFailure(func, f"{pass_name}: a function of several blocks", "run it on structured code")
    return blocks[0]
