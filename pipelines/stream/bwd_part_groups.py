# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-part-groups``: has commands of a group run one after another where less memory is then alive at the fullest
step.

Works on ``stream.cmd.concurrent`` right before ``bwd-pack-scratch``, in regions whose block of scratch memory that
places. IREE has commands run side by side that do not need one another, whatever they take: a kernel that is the last
to read a matrix, beside one that writes another. The groups stay as they are where that saves less than 1% of what a
function takes. (Where memory is laid out for one command at a time there are none: see ``bwd-overlap-commands``.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from retrograd.pipelines.analysis.kernels.group_order import Memory, find_live, part_groups
from retrograd.pipelines.analysis.kernels.hosted_buffers import Host
from retrograd.pipelines.analysis.kernels.scratch_layout import Slice
from retrograd.pipelines.stream.bwd_overlap_commands import place_together
from retrograd.pipelines.stream.bwd_pack_scratch import read_slices
from retrograd.pipelines.stream.packings import LEAST_GAIN, plan_hosted
from retrograd.pipelines.stream.passes import find_ops
from retrograd.pipelines.stream.result_storage import Access, Scratch, Storage, find_commands, read_scratch

NAME = "bwd-part-groups"
_GROUP = "stream.cmd.concurrent"


def apply(module: Any) -> None:
    """Rewrite a ``builtin.module`` in place.

    Raises:
        PassFailure: lifetimes that end before they begin.
    """
    for pack in find_ops(module, "stream.resource.pack"):
        slices = read_slices(pack, NAME)
        scratch = read_scratch(pack) if slices is not None else None
        if slices is not None and scratch is not None:
            _part(scratch, slices)


def _part(scratch: Scratch, slices: Sequence[Slice]) -> None:
    """Part the groups of the region that a block of scratch memory is for."""
    units = _read_units(scratch.block)
    ops = [unit for found in units for unit in found]
    counted = count()
    before = [[next(counted) for _ in found] for found in units]
    numbers = {command: number for number, op in enumerate(ops) for command in find_commands(op)}
    memory = _read_memory(scratch, slices, numbers)
    after = part_groups(before, memory)
    most, least = (int(find_live(steps, memory).max(initial=0)) for steps in (before, after))
    if most - least <= LEAST_GAIN * most:
        return
    steps = {number: step for step, found in enumerate(after) for number in found}
    moved = _move(scratch, {command: steps[number] for command, number in numbers.items()})
    plain = plan_hosted(scratch, slices, loose=False).size
    whole = plain + sum(storage.host.size for storage in scratch.storages)
    if plain - plan_hosted(moved, slices, loose=False).size > LEAST_GAIN * whole:
        _carry_out(ops, before, after)


def _read_units(block: Any) -> list[list[Any]]:
    """The ops of each step that can run by themselves."""
    steps = [view.operation for view in block.operations]
    inner = [[o.operation for o in op.regions[0].blocks[0].operations] if op.name == _GROUP else [op] for op in steps]
    return [[unit for unit in found if unit.name != "stream.yield"] for found in inner]


def _read_memory(scratch: Scratch, slices: Sequence[Slice], numbers: Mapping[Any, int]) -> list[Memory]:
    """Read between which ops is alive what: results, what was given up, and buffers."""

    def of(accesses: Iterable[Access]) -> frozenset[int]:
        return frozenset(numbers[access.command] for access in accesses)

    found = [
        Memory(s.host.size, of(s.accesses), is_given=s.is_given_up, is_kept=not s.is_given_up) for s in scratch.storages
    ]
    return found + [
        Memory(slices[number].size, of(access for access, _ in own)) for number, own in scratch.accesses.items()
    ]


def _move(scratch: Scratch, steps: Mapping[Any, int]) -> Scratch:
    """The same with commands at other steps."""

    def at(access: Access) -> Access:
        return replace(access, step=steps[access.command])

    def move(storage: Storage) -> Storage:
        accesses = tuple(map(at, storage.accesses))
        found, host = [access.step for access in accesses], storage.host
        lives = Host(host.size, -1, max(found)) if storage.is_given_up else Host(host.size, min(found), host.last)
        return replace(storage, accesses=accesses, host=lives)

    accesses = {number: [(at(access), added) for access, added in own] for number, own in scratch.accesses.items()}
    return Scratch(scratch.pack, accesses, [*map(move, scratch.storages)], scratch.block)


def _carry_out(ops: Sequence[Any], before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> None:
    """Put the ops of groups that were parted in front of these, and erase them."""
    whole = {frozenset(numbers) for numbers in before}
    parts = [numbers for numbers in after if frozenset(numbers) not in whole]
    groups = [ops[numbers[0]].parent for numbers in parts]
    for numbers, group in zip(parts, groups, strict=True):
        place_together([ops[number] for number in numbers], group)
    for group in dict.fromkeys(groups):
        group.erase()
