# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The passes over IREE's stream dialect by name, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from iree.compiler import ir

# Each is a function of a module, in a module of its name: what it cannot work on is a PassFailure.
PASSES = ("bwd-overlap-commands", "bwd-pack-scratch")


class PassFailure(Exception):
    """A pass that cannot do its work: ``file:line:column: error: PASS: 'OP' op: message; remedy``."""

    def __init__(self, name: str, op: Any, message: str, remedy: str) -> None:
        place = str(op.location).removeprefix("loc(").removesuffix(")").replace('"', "")
        super().__init__(f"{place}: error: {name}: '{op.name}' op: {message}; {remedy}")


def load_pass(name: str) -> Callable[[Any], None]:
    """The function that is the pass.

    Raises:
        ValueError: there is none of that name; the message lists those there are.
    """
    if name not in PASSES:
        raise ValueError(f"unknown pass '{name}'; the passes are {', '.join(PASSES)}")
    module = import_module(f"retrograd.pipelines.stream.{name.replace('-', '_')}")
    function: Callable[[Any], None] = module.apply
    return function


def find_ops(op: Any, name: str) -> Iterator[Any]:
    """The operations of that name within ``op``, less what is in executables; not within one another."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                inner = inner.operation
                if inner.name == name:
                    yield inner
                elif inner.name != "stream.executable":
                    yield from find_ops(inner, name)


def constant_of(value: Any) -> int | None:
    """The number that a value is by ``arith.constant``, or None."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "arith.constant":
        return None
    return int(ir.IntegerAttr(owner.attributes["value"]).value)


def operand_groups(op: Any) -> list[list[Any]]:
    """The operands of an op that has several variadic ones, group by group."""
    operands = list(op.operands)
    groups = []
    for size in map(int, ir.DenseI32ArrayAttr(op.attributes["operandSegmentSizes"])):
        groups.append(operands[:size])
        operands = operands[size:]
    return groups
