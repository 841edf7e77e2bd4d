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

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir

from retrograd.contract.attributes import BWD_COPIED, BWD_DONATED, BWD_PLACED
from retrograd.pipelines.analysis.kernels.hosted_buffers import (
    ALIGNMENT,
    HOSTED,
    Host,
    Place,
    find_hosts,
    place_results,
)
from retrograd.pipelines.analysis.kernels.scratch_layout import Layout, Slice, check_slices, lay_out
from retrograd.pipelines.stream.passes import PassFailure, constant_of, find_ops
from retrograd.pipelines.stream.result_storage import Access, Scratch, Storage, find_copied, read_scratch

NAME = "bwd-pack-scratch"
# When a backward begins few residuals are dead, and what its first gradients take of them for good the buffers of the
# fullest steps are without: that many of them, as a part of all, have storage of their own, where it is less.
_OWN_PARTS = (0.0, 1 / 32, 1 / 16, 1 / 8)
_REFLECTION = "iree.reflection"


@dataclass(frozen=True)
class Packing:
    """Where the buffers of a pack go: in hosts by number, the others in a block; None for one that is hosted. Where
    results go, by the number of their storage: in that of another, which was given up."""

    pack: Any
    layout: Layout
    block: tuple[int | None, ...]
    scratch: Scratch | None
    hosted: dict[int, Place]
    placed: dict[int, Place]

    @property
    def size(self) -> int:
        """Bytes of the block, less those of results that need no storage of their own."""
        storages = self.scratch.storages if self.scratch is not None else []
        return self.layout.size - sum(storages[number].host.size for number in self.placed)


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
        slices = _read_slices(pack)
        if slices is not None:
            packings.append(_plan(pack, slices, loose, hosts))
    return packings


def carry_out(module: Any, packings: Iterable[Packing]) -> None:
    """Rewrite what was planned of a module; its functions then say what their callers have to know."""
    for packing in packings:
        _replace(packing)
    _tell_copied(module)


def _tell_copied(module: Any) -> None:
    """Have each function of a module say which of its results are not written by kernels alone: whoever gives storage
    for them has to let it be copied to."""
    for execute in find_ops(module, "stream.cmd.execute"):
        function = execute.parent
        # Commands may stand in a branch, or in a loop.
        while function is not None and not function.name.endswith(".func"):
            function = function.parent
        if function is not None and (copied := find_copied(execute)):
            _say(function, {BWD_COPIED: sorted(copied)})


def _read_slices(pack: Any) -> list[Slice] | None:
    """The buffers that are packed, of aligned sizes; None where a size is no constant."""
    sizes = [constant_of(size) for size in pack.operands]
    steps = [int(ir.IntegerAttr(step).value) for step in pack.attributes["lifetime_intervals"]]
    # With an offset there is an operand more.
    if len(steps) != 2 * len(sizes):
        return None
    slices = []
    for first, last, size in zip(steps[::2], steps[1::2], sizes, strict=True):
        if size is None:
            return None
        slices.append(_whole(first, last, size))
    return slices


def _whole(first: int, last: int, size: int) -> Slice:
    """A slice of a multiple of the alignment, behind which another may begin."""
    return Slice(first, last, -(-size // ALIGNMENT) * ALIGNMENT)


def _plan(pack: Any, slices: list[Slice], loose: bool, hosts: bool) -> Packing:
    try:
        check_slices(slices)
    except ValueError as error:
        raise PassFailure(NAME, pack, str(error), "run it right after iree-stream-schedule-allocation") from error
    scratch = read_scratch(pack) if hosts else None
    if scratch is None:
        layout = lay_out(slices, loose=loose)
        return Packing(pack, layout, (*layout.offsets,), None, {}, {})
    # IREE's steps are others: they count ops that are no command in the end.
    slices = [_alive(part, scratch.lives.get(number)) for number, part in enumerate(slices)]
    movable = [scratch.is_computed(number) for number in range(len(slices))]
    choices: list[dict[int, Place]] = [{}]
    for part in _OWN_PARTS:
        placed = _place_results(scratch.storages, part)
        choices += [placed] if placed not in choices else []
    tight = [_host(scratch, slices, movable, False, placed) for placed in choices]
    # Of choices alike the first that there is.
    best = min(tight, key=lambda packing: packing.size)
    if loose:
        best = _host(scratch, slices, movable, loose, best.placed)
    if best.hosted:
        pack.attributes[HOSTED] = ir.DenseI64ArrayAttr.get(sorted(best.hosted), pack.context)
    return best


def _place_results(storages: Sequence[Storage], own: float) -> dict[int, Place]:
    """Places for results in storages that were given up, by number; of those that could be there the first that are
    written, this part of them, have storage of their own."""
    results = {
        number: _whole(s.host.first, s.host.last, s.host.size)
        for number, s in enumerate(storages)
        if not s.is_given_up and s.is_movable
    }
    by_step = sorted(results, key=lambda number: results[number].first)
    for number in by_step[: math.ceil(own * len(by_step))]:
        del results[number]
    hosts = {number: s.host for number, s in enumerate(storages) if s.takes != "none"}
    return place_results(results, hosts, [number for number in hosts if storages[number].takes == "one"])


def _host(
    scratch: Scratch, slices: list[Slice], movable: Sequence[bool], loose: bool, placed: Mapping[int, Place]
) -> Packing:
    """Plan a pack whose buffers may lie in storages where they are ``movable``, with results at the places
    ``placed``."""
    taken = _read_taken(scratch.storages, placed)
    # Storage that a result does not have holds nothing.
    rooms = [Host(0, 0, 0) if number in placed else s.host for number, s in enumerate(scratch.storages)]
    hosted = find_hosts(slices, rooms, movable, taken)
    numbers = [number for number in range(len(slices)) if number not in hosted]
    layout = lay_out([slices[number] for number in numbers], loose=loose)
    offsets = dict(zip(numbers, layout.offsets, strict=True))
    block = tuple(offsets.get(number) for number in range(len(slices)))
    return Packing(scratch.pack, layout, block, scratch, hosted, dict(placed))


def _read_taken(storages: Sequence[Storage], placed: Mapping[int, Place]) -> dict[int, list[tuple[int, Slice]]]:
    """List what results have of each host, at which offset."""
    taken: dict[int, list[tuple[int, Slice]]] = {}
    for number, place in placed.items():
        host = storages[number].host
        taken.setdefault(place.host, []).append((place.offset, _whole(host.first, host.last, host.size)))
    return taken


def _alive(part: Slice, steps: tuple[int, int] | None) -> Slice:
    """A slice from the first step that accesses it to the last; of no size where none does."""
    return Slice(*steps, part.size) if steps is not None else Slice(0, 0, 0)


def _replace(packing: Packing) -> None:
    pack, scratch = packing.pack, packing.scratch
    if scratch is not None:
        for number, place in packing.hosted.items():
            for access, added in scratch.accesses[number]:
                _move(pack, access, scratch.storages[place.host], place.offset + added)
        for number, place in packing.placed.items():
            for access in scratch.storages[number].accesses:
                added = constant_of(access.command.operands[access.range.offset]) or 0
                _move(pack, access, scratch.storages[place.host], place.offset + added)
        _tell(packing, scratch.storages)
    # A block of nothing is one that IREE's drivers are never asked for otherwise.
    size = packing.layout.size or (ALIGNMENT if packing.hosted else 0)
    for result, offset in zip(pack.results, (size, *packing.block), strict=True):
        # Of what is hosted sums may be left that nobody uses.
        result.replace_all_uses_with(_constant(pack, offset or 0))
    pack.erase()


def _tell(packing: Packing, storages: Sequence[Storage]) -> None:
    """Have the function say which arguments it writes over, and which results lie there."""
    hosts = {place.host for place in (*packing.hosted.values(), *packing.placed.values())}
    written = [storages[host].number for host in sorted(hosts) if storages[host].is_given_up]
    placed = [
        f"{storages[n].number}:{storages[place.host].number}:{place.offset}:{storages[n].host.size}"
        for n, place in sorted(packing.placed.items())
    ]
    if written:
        _say(packing.pack.parent, {BWD_DONATED: written, BWD_PLACED: placed})


def _say(function: Any, facts: Mapping[str, Sequence[object]]) -> None:
    """Add to what the program says of a function, where other regions of its commands may have said something."""
    attributes, context = function.attributes, function.context
    said = {n.name: n.attr for n in ir.DictAttr(attributes[_REFLECTION])} if _REFLECTION in attributes else {}
    for key, more in facts.items():
        before = [ir.StringAttr(said[key]).value] if key in said else []
        if before or more:
            said[key] = ir.StringAttr.get(",".join([*before, *map(str, more)]), context)
    attributes[_REFLECTION] = ir.DictAttr.get(said, context)


def _move(pack: Any, access: Access, storage: Storage, offset: int) -> None:
    """Have a command access storage for a result, or what was given up, at an offset."""
    operands, taken = access.command.operands, access.range
    operands[taken.resource], operands[taken.size] = storage.resource, storage.size
    operands[taken.offset] = _constant(pack, offset)


def _constant(pack: Any, number: int) -> Any:
    with ir.InsertionPoint(pack), pack.location:
        index = ir.IndexType.get(pack.context)
        value = ir.IntegerAttr.get(index, number)
        return ir.Operation.create("arith.constant", results=[index], attributes={"value": value}).result
