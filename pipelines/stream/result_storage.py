# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which commands access the buffers of a function's scratch memory, storage for its results, and arguments that the
caller gave up: the first step towards having the one lie in the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from iree.compiler import ir

from retrograd.contract.attributes import BWD_DONATED
from retrograd.pipelines.analysis.kernels.hosted_buffers import Host
from retrograd.pipelines.stream.passes import Range, constant_of, operand_groups, read_ranges

_EXECUTE, _IMPORT, _ALLOCA = "stream.cmd.execute", "stream.tensor.import", "stream.resource.alloca"
_DISPATCH = "stream.cmd.dispatch"
_GROUPS = frozenset({"stream.cmd.concurrent", "stream.cmd.serial"})
# Who may have storage for a result besides the one region of commands: what only hands it on.
_BARRIER = "util.optimization_barrier"
_HANDS_ON = frozenset({"stream.timepoint.await", _BARRIER, "stream.tensor.export"})
_FREES = "stream.resource.dealloca"
_FOREVER = 1 << 40

JOINED = "joined"
"""Of :data:`BWD_DONATED`: several results may lie there, and the caller may have it lie behind others that are so."""


@dataclass(frozen=True)
class Access:
    """A range of bytes that a command takes, at the ``step`` of that command."""

    command: Any
    range: Range
    step: int


@dataclass(frozen=True)
class Storage:
    """Storage that the caller gave for a result, or gave up: when it is free, the value that it is in a region of
    commands, that of its size, and who accesses it. ``number`` is that of the result, or of the argument that was given
    up, ``is_given_up``; of these, ``takes`` says how many results may lie there, as :data:`BWD_DONATED` does."""

    host: Host
    resource: Any
    size: Any
    accesses: tuple[Access, ...]
    number: int
    is_given_up: bool = False
    takes: str = "none"

    @property
    def is_movable(self) -> bool:
        """Whether who accesses it can access other memory: places in it are constants."""
        return all(constant_of(a.command.operands[a.range.offset]) is not None for a in self.accesses)


@dataclass
class Scratch:
    """A block of scratch memory whose buffers ``pack`` places, and the one region of commands that uses it.

    ``accesses`` are those of each buffer, by number, each with what is added to the buffer's offset; ``storages`` are
    those of the results that the region writes, and of what the caller gave up and the region reads. The ops of
    ``block`` are the region's steps.
    """

    pack: Any
    accesses: dict[int, list[tuple[Access, int]]] = field(default_factory=dict)
    storages: list[Storage] = field(default_factory=list)
    block: Any = None

    def is_computed(self, number: int) -> bool:
        """Whether kernels alone access a buffer: the caller's storage is imported for them, and not to be filled."""
        return all(access.command.name == _DISPATCH for access, _ in self.accesses.get(number, ()))

    @cached_property
    def lives(self) -> dict[int, tuple[int, int]]:
        """The first and the last step of each buffer that is accessed."""
        steps = {number: [access.step for access, _ in found] for number, found in self.accesses.items()}
        return {number: (min(found), max(found)) for number, found in steps.items()}


def read_scratch(pack: Any) -> Scratch | None:
    """Read who accesses what ``pack`` places; None where that is not known of all of it."""
    execute, block = _find_region(pack)
    if execute is None:
        return None
    scratch = Scratch(pack, block=block)
    commands = [(step, c) for step, op in enumerate(block.operations) for c in find_commands(op.operation)]
    ranges: dict[Any, list[Access]] = {}
    for step, command in commands:
        taken_ranges = read_ranges(command)
        if taken_ranges is None:
            return None
        for taken in taken_ranges:
            ranges.setdefault(command.operands[taken.resource], []).append(Access(command, taken, step))
    resources = operand_groups(execute)[0]
    # Storage of results that a device's memory does not let IREE fill or copy to makes the call fail, and the caller
    # calls again: by then nothing may be written over. On a CPU, where results may lie in what is given up, it is known
    # which these are.
    imported = [a for a, value in zip(block.arguments, resources, strict=False) if _import_of(value) is not None]
    is_repeatable = all(access.command.name == _DISPATCH for a in imported for access in ranges.get(a, ()))
    for argument, value in zip(block.arguments, resources, strict=False):
        if _is_scratch_of(value, pack):
            for access in ranges.get(argument, ()):
                place = _find_place(access.command.operands[access.range.offset], pack)
                if place is None:
                    return None
                scratch.accesses.setdefault(place[0], []).append((access, place[1]))
        elif argument in ranges:
            found = ranges[argument]
            steps = [access.step for access in found]
            size = found[0].command.operands[found[0].range.size]
            host = _read_host(value, execute, steps)
            if host is not None:
                scratch.storages.append(Storage(host, argument, size, tuple(found), _number_of(value, False)))
            elif (given_up := _read_donated(value, execute, steps)) is not None:
                host, takes = given_up
                if not is_repeatable and takes == "none":
                    continue
                number = _number_of(value, True)
                scratch.storages.append(Storage(host, argument, size, tuple(found), number, True, takes))
    return scratch if _is_known(pack, scratch) else None


def import_of(storage: Storage) -> Any:
    """The op that imports a storage."""
    block = storage.resource.owner
    (resources, *_) = operand_groups(block.owner)
    return resources[ir.BlockArgument(storage.resource).arg_number].owner.operation


def find_copied(execute: Any, *, arguments: bool = False) -> set[int]:
    """The results, by number, whose storage a region of commands fills or copies to; or the ``arguments`` that it fills
    or copies to, since they were given up."""
    block = execute.regions[0].blocks[0]
    resources = dict(zip(block.arguments, operand_groups(execute)[0], strict=False))
    found = set()
    for op in block.operations:
        for command in find_commands(op.operation):
            for taken in read_ranges(command) or () if command.name != _DISPATCH else ():
                owner = _import_of(resources[command.operands[taken.resource]])
                if not taken.writes or owner is None or not isinstance(owner.operands[0].owner, ir.Block):
                    continue
                if ("consume" in owner.attributes) != arguments:
                    found.add(_number_of(owner.results[0], arguments))
    return found


def _find_region(pack: Any) -> tuple[Any, Any]:
    """The region of commands that has the block of memory, its op and its block; None where there are several, or it
    may run more than once."""
    allocas = [use.owner.operation for use in pack.results[0].uses]
    allocas = [op for op in allocas if op.name == _ALLOCA]
    if len(allocas) != 1:
        return None, None
    users = [use.owner.operation for use in allocas[0].results[0].uses]
    executes = [user for user in users if user.name == _EXECUTE]
    if len(executes) != 1 or any(user.name not in (_EXECUTE, _FREES) for user in users):
        return None, None
    (execute,) = executes
    function = execute.parent
    if not function.name.endswith(".func") or execute.block != function.regions[0].blocks[0]:
        return None, None
    return execute, execute.regions[0].blocks[0]


def find_commands(op: Any) -> Iterator[Any]:
    """The commands in ``op``, or itself."""
    if op.name in _GROUPS:
        for inner in op.regions[0].blocks[0].operations:
            yield from find_commands(inner.operation)
    elif op.name != "stream.yield":
        yield op


def _is_scratch_of(value: Any, pack: Any) -> bool:
    owner = value.owner
    return not isinstance(owner, ir.Block) and owner.name == _ALLOCA and owner.operation.operands[0] == pack.results[0]


def _find_place(offset: Any, pack: Any) -> tuple[int, int] | None:
    """The buffer that an offset in the block is in, and how far behind its begin."""
    added = 0
    while not isinstance(offset.owner, ir.Block):
        owner = offset.owner.operation
        if owner == pack:
            return list(pack.results).index(offset) - 1, added
        if owner.name != "arith.addi":
            return None
        constants = [constant_of(operand) for operand in owner.operands]
        if (constants[0] is None) == (constants[1] is None):
            return None
        number = 0 if constants[1] is None else 1
        added += constants[number] or 0
        offset = owner.operands[1 - number]
    return None


def _read_host(value: Any, execute: Any, steps: Sequence[int]) -> Host | None:
    """Reads what can be hosted in a resource that ``execute`` takes and accesses at these steps, if it is storage for a
    result: it holds nothing before it is written for the first time."""
    owner = _import_of(value)
    if owner is None or "consume" not in owner.attributes:
        return None
    # Of two imports of one buffer the other may be written before.
    imports = [use.owner.name for use in owner.operands[0].uses]
    if imports.count(_IMPORT) != 1:
        return None
    users = [use.owner.operation for use in value.uses]
    others = [user for user in users if user != execute]
    size = constant_of(owner.operands[1])
    if len(users) - len(others) != 1 or any(user.name not in _HANDS_ON for user in others) or size is None:
        return None
    return Host(size, min(steps), _FOREVER)


def _read_donated(value: Any, execute: Any, steps: Sequence[int]) -> tuple[Host, str] | None:
    """Read, as :func:`_read_host` does, an argument that the caller gave up and that nobody but ``execute`` reads: it
    holds nothing after its last use. With it how many results may lie there."""
    owner = _import_of(value)
    if owner is None or "consume" in owner.attributes:
        return None
    given, size = owner.operands[0], constant_of(owner.operands[1])
    users = [use.owner.operation for use in value.uses]
    # What holds an argument against IREE's folding gives nothing to anybody.
    is_alone = [user for user in users if user.name != _BARRIER or any(list(r.uses) for r in user.results)] == [execute]
    if not isinstance(given.owner, ir.Block) or not is_alone or size is None:
        return None
    argument = ir.BlockArgument(given)
    attributes = argument.owner.owner.attributes
    own = [use.owner.name for use in given.uses if use.owner.name == _IMPORT]
    if "arg_attrs" not in attributes or len(own) != 1:
        return None
    said = ir.DictAttr(ir.ArrayAttr(attributes["arg_attrs"])[argument.arg_number])
    return (Host(size, -1, max(steps)), str(ir.StringAttr(said[BWD_DONATED]).value)) if BWD_DONATED in said else None


def _number_of(value: Any, is_argument: bool) -> int:
    """The number of the argument that is imported as ``value``, or of the result whose storage that argument is: these
    are the last."""
    argument = ir.BlockArgument(_import_of(value).operands[0])
    if is_argument:
        return int(argument.arg_number)
    function = argument.owner.owner
    results = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value).results
    return int(argument.arg_number) - len(argument.owner.arguments) + len(results)


def _import_of(value: Any) -> Any:
    """The op that imports a buffer of the caller's as ``value``; None where it is something else."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) or owner.name != _IMPORT else owner


def _is_known(pack: Any, scratch: Scratch) -> bool:
    """Whether all uses of the places are accesses that were read."""
    known = {(access.command, access.range.offset) for found in scratch.accesses.values() for access, _ in found}
    waiting = list(pack.results)[1:]
    while waiting:
        for use in waiting.pop().uses:
            owner = use.owner.operation
            if owner.name == "arith.addi":
                waiting.extend(owner.results)
            elif (owner, use.operand_number) not in known:
                return False
    return True
