# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-pack-scratch``: places the buffers of each function in its block of scratch memory, in storage for its results,
or in arguments that the caller gave up.

Works on ``stream.resource.pack``, which IREE's ``iree-stream-schedule-allocation`` leaves, and replaces what it gives
by constants. IREE's own ``iree-stream-layout-slices`` places buffers in the order they are made in. A pack with a size
that is not a constant is left to it.

Storage for a result, which the caller gives, holds nothing before the first command that accesses it: buffers that are
alive at the fullest step lie there (``analysis/kernels/hosted_buffers.py``). So they do in what
the caller gave up (:data:`BWD_DONATED`), after the last command that reads it; and results lie there, which are written
later. What a function writes over, and which results lie where, is part of what the program says of it
(``iree.reflection``): who calls it has to be the only one who has these arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from iree.compiler import ir

from retrograd.contract.attributes import (
    BWD_COPIED,
    BWD_COPIED_OUT,
    BWD_DONATED,
    BWD_FILLED,
    BWD_JOINED,
    BWD_PLACED,
)
from retrograd.pipelines.analysis.kernels.arenas import Arena
from retrograd.pipelines.analysis.kernels.hosted_buffers import ALIGNMENT, HOSTED
from retrograd.pipelines.analysis.kernels.scratch_layout import Slice, check_slices
from retrograd.pipelines.stream.packings import Packing, plan_block, plan_hosted, whole_slice
from retrograd.pipelines.stream.passes import PassFailure, constant_of, find_ops, operand_groups
from retrograd.pipelines.stream.result_storage import Access, Storage, find_copied, import_of, read_scratch

NAME = "bwd-pack-scratch"
_REFLECTION = "iree.reflection"


def apply(module: Any, *, loose: bool = True, hosts: bool = True) -> None:
    """Rewrite a ``builtin.module`` in place; ``loose`` is as for :func:`lay_out`, and ``hosts`` has buffers lie in
    storage for results.

    Raises:
        PassFailure: lifetimes that end before they begin.
    """
    carry_out(module, plan_packings(module, loose=loose, hosts=hosts))


def plan_packings(module: Any, *, loose: bool = True, hosts: bool = True) -> list[Packing]:
    """Find places for the buffers of all packs of constant sizes, and note which are hosted (``HOSTED``).

    Raises:
        PassFailure: as :func:`apply`.
    """
    packings = []
    for pack in find_ops(module, "stream.resource.pack"):
        slices = read_slices(pack, NAME)
        if slices is not None:
            packings.append(_plan(pack, slices, loose, hosts))
    return packings


def carry_out(module: Any, packings: Iterable[Packing]) -> None:
    """Rewrite what was planned of a module; its functions then say what their callers have to know."""
    for packing in packings:
        _replace(packing)
    _tell_copied(module)


def _tell_copied(module: Any) -> None:
    """Have each function of a module say which of its results, and of the arguments that it writes over, are not
    written by kernels alone: whoever gives storage for them has to let it be copied to."""
    for execute in find_ops(module, "stream.cmd.execute"):
        function = execute.parent
        # Commands may stand in a branch, or in a loop.
        while function is not None and not function.name.endswith(".func"):
            function = function.parent
        if function is not None:
            said = {BWD_COPIED: sorted(find_copied(execute)), BWD_FILLED: sorted(find_copied(execute, arguments=True))}
            _say(function, {key: numbers for key, numbers in said.items() if numbers})


def read_slices(pack: Any, name: str) -> list[Slice] | None:
    """The buffers that are packed, of aligned sizes; None where a size is no constant.

    Raises:
        PassFailure: of the pass ``name``, for lifetimes that end before they begin.
    """
    sizes = [constant_of(size) for size in pack.operands]
    steps = [int(ir.IntegerAttr(step).value) for step in pack.attributes["lifetime_intervals"]]
    # With an offset there is an operand more.
    if len(steps) != 2 * len(sizes):
        return None
    slices = []
    for first, last, size in zip(steps[::2], steps[1::2], sizes, strict=True):
        if size is None:
            return None
        slices.append(whole_slice(first, last, size))
    try:
        check_slices(slices)
    except ValueError as error:
        raise PassFailure(name, pack, str(error), "run it right after iree-stream-schedule-allocation") from error
    return slices


def _plan(pack: Any, slices: list[Slice], loose: bool, hosts: bool) -> Packing:
    scratch = read_scratch(pack) if hosts else None
    if scratch is None:
        return plan_block(pack, slices, loose)
    packing = plan_hosted(scratch, slices, loose)
    if packing.hosted:
        pack.attributes[HOSTED] = ir.DenseI64ArrayAttr.get(sorted(packing.hosted), pack.context)
    return packing


def _replace(packing: Packing) -> None:
    pack, scratch = packing.pack, packing.scratch
    if scratch is not None:
        rooms = [*scratch.storages, *(_join(arena, scratch.storages, pack) for arena in packing.choice.arenas)]
        for number, place in packing.hosted.items():
            for access, added in scratch.accesses[number]:
                _move(pack, access, rooms[place.host], place.offset + added)
        for number, place in packing.choice.placed.items():
            _move_all(pack, scratch.storages[number], rooms[place.host], place.offset)
        _tell(packing, scratch.storages, rooms)
    # A block of nothing is one that IREE's drivers are never asked for otherwise.
    size = packing.layout.size or (ALIGNMENT if packing.hosted else 0)
    for result, offset in zip(pack.results, (size, *packing.block), strict=True):
        # Of what is hosted sums may be left that nobody uses.
        result.replace_all_uses_with(_constant(pack, offset or 0))
    pack.erase()


def _join(arena: Arena, storages: Sequence[Storage], pack: Any) -> Storage:
    """Have the first member of an arena stand for all of it, and who accesses another access that."""
    base = storages[arena.members[0]]
    imported = import_of(base)
    size = _constant(imported, arena.size)
    imported.operands[1] = size
    for use in [*imported.results[0].uses]:
        if use.owner.name == "stream.cmd.execute":
            resources = operand_groups(use.owner)[0]
            use.owner.operands[len(resources) + use.operand_number] = size
    # Who calls the function gives the bytes of the arena.
    for use in [*imported.operands[0].uses]:
        if use.owner.name == "hal.buffer_view.assert":
            use.owner.operation.erase()
    whole = replace(base, size=size)
    for member, offset in zip(arena.members, arena.offsets, strict=False):
        _move_all(pack, storages[member], whole, offset)
    return whole


def _tell(packing: Packing, storages: Sequence[Storage], rooms: Sequence[Storage]) -> None:
    """Have the function say which arguments it writes over, which of them lie one behind another, and which results lie
    there."""
    choice = packing.choice
    hosts = {place.host for place in (*packing.hosted.values(), *choice.placed.values())}
    written = [rooms[host].number for host in sorted(hosts) if host < len(storages) and rooms[host].is_given_up]
    placed = [
        f"{storages[n].number}:{rooms[place.host].number}:{place.offset}:{storages[n].host.size}"
        for n, place in sorted(choice.placed.items())
    ]
    joined = [
        f"{storages[arena.members[0]].number}:{arena.size}:{storages[member].number}:{offset}"
        for arena in choice.arenas
        for member, offset in zip(arena.members, arena.offsets, strict=False)
    ]
    copied = [storages[n].number for n in sorted(choice.copied)]
    if written or joined:
        facts = {BWD_PLACED: placed, BWD_JOINED: joined}
        _say(packing.pack.parent, {BWD_DONATED: written, **facts, BWD_COPIED_OUT: copied})


def _say(function: Any, facts: Mapping[str, Sequence[object]]) -> None:
    """Add to what the program says of a function, where other regions of its commands may have said something."""
    attributes, context = function.attributes, function.context
    said = {n.name: n.attr for n in ir.DictAttr(attributes[_REFLECTION])} if _REFLECTION in attributes else {}
    for key, more in facts.items():
        before = [ir.StringAttr(said[key]).value] if key in said else []
        if before or more:
            said[key] = ir.StringAttr.get(",".join([*before, *map(str, more)]), context)
    if facts:
        attributes[_REFLECTION] = ir.DictAttr.get(said, context)


def _move_all(pack: Any, storage: Storage, room: Storage, offset: int) -> None:
    """Have all that access a storage access memory at an offset in another."""
    for access in storage.accesses:
        _move(pack, access, room, offset + (constant_of(access.command.operands[access.range.offset]) or 0))


def _move(pack: Any, access: Access, storage: Storage, offset: int) -> None:
    """Have a command access storage for a result, or what was given up, at an offset."""
    operands, taken = access.command.operands, access.range
    operands[taken.resource], operands[taken.size] = storage.resource, storage.size
    operands[taken.offset] = _constant(pack, offset)


def _constant(op: Any, number: int) -> Any:
    """A constant in front of ``op``."""
    with ir.InsertionPoint(op), op.location:
        index = ir.IndexType.get(op.context)
        value = ir.IntegerAttr.get(index, number)
        return ir.Operation.create("arith.constant", results=[index], attributes={"value": value}).result
