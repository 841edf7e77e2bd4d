# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The passes over IREE's dialects by name, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from iree.compiler import ir

# Each is a function of a module, in a module of its name: what it cannot work on is a PassFailure.
PASSES = ("bwd-join-indices", "bwd-overlap-commands", "bwd-pack-scratch", "bwd-part-groups")
# Of an accesses attribute: the bit that says that bytes are written.
_WRITES = 2


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


@dataclass(frozen=True)
class Range:
    """A range of bytes that a command takes: the numbers of its operands that are the resource, its size, the offset
    and the length; ``writes`` says whether it writes there."""

    resource: int
    size: int
    offset: int
    length: int
    writes: bool


def read_ranges(command: Any) -> list[Range] | None:
    """The ranges that a command takes; None where that is not known."""
    if command.name == "stream.cmd.dispatch":
        # Behind what is not memory come all resources, then all sizes, offsets and lengths.
        workload, uniforms, taken, *_ = map(len, operand_groups(command))
        flags = [int(ir.IntegerAttr(flag).value) for flag in command.attributes["resource_accesses"]]
        firsts = range(workload + uniforms, workload + uniforms + taken)
        return [
            Range(first, first + taken, first + 2 * taken, first + 3 * taken, bool(flag & _WRITES))
            for first, flag in zip(firsts, flags, strict=True)
        ]
    if command.name == "stream.cmd.fill":
        return [Range(0, 1, 2, 3, True)]
    if command.name == "stream.cmd.copy":
        return [Range(0, 1, 2, 6, False), Range(3, 4, 5, 6, True)]
    return None
