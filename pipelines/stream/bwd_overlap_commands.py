# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-overlap-commands``: has commands run at the same time that touch different memory, or the same and only read.

Works on ``stream.cmd.execute`` whose commands run one after the other, with all places in memory given: what it groups
into ``stream.cmd.concurrent`` takes no byte more. IREE groups kernels before it places their buffers, which then have
to be alive together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir

from retrograd.pipelines.analysis.kernels.command_waves import END, Access, find_waves
from retrograd.pipelines.stream.passes import PassFailure, constant_of, find_ops, read_ranges

NAME = "bwd-overlap-commands"
_RESOURCE = "!stream.resource<"


@dataclass(frozen=True)
class _Resource:
    """A resource's number, the same for what may be the same memory, and whether places in it are those in all of it:
    in a part of it they are not."""

    number: int
    is_whole: bool


# What hands on the memory of an operand: that of the same place among the resources, or its only one.
_HANDS_ON = frozenset({"stream.resource.subview", "stream.timepoint.await", "util.optimization_barrier"})
# What gives memory of its own, or that of a caller's buffer.
_GIVES = frozenset({"stream.resource.alloc", "stream.resource.alloca", "stream.resource.constants"})
_IMPORT, _LOAD = "stream.tensor.import", "util.global.load"


def apply(module: Any) -> None:
    """Rewrite a ``builtin.module`` in place.

    Raises:
        PassFailure: ops that have no memory yet.
    """
    for execute in find_ops(module, "stream.async.execute"):
        remedy = "run it behind iree-stream-cmd-transformation-pipeline"
        raise PassFailure(NAME, execute, "its ops have no memory yet", remedy)
    for execute in find_ops(module, "stream.cmd.execute"):
        (block,) = execute.regions[0].blocks
        *commands, end = (op.operation for op in block.operations)
        resources = _number_resources(execute, block)
        waves: dict[int, list[Any]] = {}
        for command, wave in zip(commands, find_waves([_read_accesses(c, resources) for c in commands]), strict=True):
            waves.setdefault(wave, []).append(command)
        for wave in sorted(waves):
            place_together(waves[wave], end)


def _number_resources(execute: Any, block: Any) -> dict[Any, _Resource]:
    """The resources of a region, by its arguments; one for all where it is not known of each which memory it is."""
    captured = [operand for operand in execute.operands if str(operand.type).startswith(_RESOURCE)]
    found = [_find_root(value) for value in captured]
    if any(root is None for root, _ in found):
        return dict.fromkeys(block.arguments, _Resource(0, is_whole=False))
    numbers: dict[Any, int] = {}
    return {
        argument: _Resource(numbers.setdefault(root, len(numbers)), is_whole)
        for argument, (root, is_whole) in zip(block.arguments, found, strict=True)
    }


def _find_root(value: Any) -> tuple[Any, bool]:
    """Find the value that tells the memory of a resource from any other's, None where that is not known, and whether
    the resource is all of it."""
    is_whole = True
    while not isinstance(value.owner, ir.Block) and value.owner.name in _HANDS_ON:
        owner = value.owner.operation
        is_whole &= owner.name != "stream.resource.subview"
        resources = [operand for operand in owner.operands if str(operand.type).startswith(_RESOURCE)]
        value = resources[list(owner.results).index(value)] if len(resources) > 1 else resources[0]
    if isinstance(value.owner, ir.Block):
        # Arguments of a function, which its caller gives: those of other blocks may be anything.
        return (value, is_whole) if _is_entry(value.owner) else (None, False)
    owner = value.owner.operation
    if owner.name == _IMPORT:
        buffer = owner.operands[0]
        return (buffer if isinstance(buffer.owner, ir.Block) and _is_entry(buffer.owner) else None), is_whole
    if owner.name == _LOAD:
        return str(owner.attributes["global"]), is_whole
    return (value if owner.name in _GIVES else None), is_whole


def _is_entry(block: Any) -> bool:
    """Whether a block is the first of a function."""
    owner = block.owner
    return str(owner.name).endswith(".func") and bool(block == owner.regions[0].blocks[0])


def _read_accesses(command: Any, resources: dict[Any, _Resource]) -> list[Access] | None:
    """Read which memory a command accesses; None where that is not known."""
    ranges, operands = read_ranges(command), command.operands
    if ranges is None:
        return None
    return [
        _read_access(resources, operands[r.resource], operands[r.offset], operands[r.length], r.writes) for r in ranges
    ]


def _read_access(resources: dict[Any, _Resource], taken: Any, offset: Any, length: Any, writes: bool) -> Access:
    """An access to all of a resource where its bytes are not known."""
    resource, start, size = resources[taken], constant_of(offset), constant_of(length)
    if start is None or size is None or not resource.is_whole:
        return Access(resource.number, 0, END, writes)
    return Access(resource.number, start, start + size, writes)


def place_together(commands: Sequence[Any], end: Any) -> None:
    """Move ``commands`` in front of ``end``, several as one group."""
    if len(commands) == 1:
        commands[0].move_before(end)
        return
    with ir.InsertionPoint(end), commands[0].location:
        group = ir.Operation.create("stream.cmd.concurrent", regions=1)
        with ir.InsertionPoint(group.regions[0].blocks.append()):
            last = ir.Operation.create("stream.yield")
    for command in commands:
        command.move_before(last)
