# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-pack-scratch``: places the buffers of each function in its block of scratch memory, or in storage for
its results.

Works on ``stream.resource.pack``, which IREE's ``iree-stream-schedule-allocation`` leaves, and replaces what it gives
by constants. IREE's own ``iree-stream-layout-slices`` places buffers in the order they are made in. A pack with a size
that is not a constant is left to it.

Storage for a result, which the caller gives, holds nothing before the first command that accesses it: buffers that are
alive at the fullest step lie there (``analysis/kernels/hosted_buffers.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir

from retrograd.pipelines.analysis.kernels.hosted_buffers import HOSTED, Place, find_hosts
from retrograd.pipelines.analysis.kernels.scratch_layout import Layout, Slice, check_slices, lay_out
from retrograd.pipelines.stream.passes import PassFailure, constant_of, find_ops
from retrograd.pipelines.stream.result_storage import Access, Scratch, Storage, read_scratch

NAME = "bwd-pack-scratch"
# Of each buffer, on all devices: IREE's --iree-stream-resource-min-offset-alignment for CPUs.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Packing:
    """Where the buffers of a pack go: in hosts by number, the others in a block; None for one that is hosted."""

    pack: Any
    layout: Layout
    block: tuple[int | None, ...]
    scratch: Scratch | None
    hosted: dict[int, Place]


def apply(module: Any, *, loose: bool = True, hosts: bool = True) -> None:
    """Rewrite a ``builtin.module`` in place; ``loose`` is as for :func:`lay_out`, and ``hosts`` has buffers lie in
    storage for results.

    Raises:
        PassFailure: lifetimes that end before they begin.
    """
    carry_out(plan_packings(module, loose=loose, hosts=hosts))


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


def carry_out(packings: Iterable[Packing]) -> None:
    """Rewrite what was planned."""
    for packing in packings:
        _replace(packing)


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
        slices.append(Slice(first, last, -(-size // _ALIGNMENT) * _ALIGNMENT))
    return slices


def _plan(pack: Any, slices: list[Slice], loose: bool, hosts: bool) -> Packing:
    try:
        check_slices(slices)
    except ValueError as error:
        raise PassFailure(NAME, pack, str(error), "run it right after iree-stream-schedule-allocation") from error
    scratch = read_scratch(pack) if hosts else None
    hosted: dict[int, Place] = {}
    if scratch is not None:
        # IREE's steps are others: they count ops that are no command in the end.
        slices = [_alive(part, scratch.lives.get(number)) for number, part in enumerate(slices)]
        movable = [scratch.is_computed(number) for number in range(len(slices))]
        hosted = find_hosts(slices, [storage.host for storage in scratch.storages], movable)
    numbers = [number for number in range(len(slices)) if number not in hosted]
    layout = lay_out([slices[number] for number in numbers], loose=loose)
    offsets = dict(zip(numbers, layout.offsets, strict=True))
    if hosted:
        pack.attributes[HOSTED] = ir.DenseI64ArrayAttr.get(sorted(hosted), pack.context)
    return Packing(pack, layout, tuple(offsets.get(number) for number in range(len(slices))), scratch, hosted)


def _alive(part: Slice, steps: tuple[int, int] | None) -> Slice:
    """A slice from the first step that accesses it to the last; of no size where none does."""
    return Slice(*steps, part.size) if steps is not None else Slice(0, 0, 0)


def _replace(packing: Packing) -> None:
    pack, scratch = packing.pack, packing.scratch
    if scratch is not None and packing.hosted:
        for number, place in packing.hosted.items():
            for access, added in scratch.accesses[number]:
                _move(pack, access, scratch.storages[place.host], place.offset + added)
    # A block of nothing is one that IREE's drivers are never asked for otherwise.
    size = packing.layout.size or (_ALIGNMENT if packing.hosted else 0)
    for result, offset in zip(pack.results, (size, *packing.block), strict=True):
        # Of what is hosted sums may be left that nobody uses.
        result.replace_all_uses_with(_constant(pack, offset or 0))
    pack.erase()


def _move(pack: Any, access: Access, storage: Storage, offset: int) -> None:
    """Have a command access storage for a result, at an offset."""
    operands, taken = access.command.operands, access.range
    operands[taken.resource], operands[taken.size] = storage.resource, storage.size
    operands[taken.offset] = _constant(pack, offset)


def _constant(pack: Any, number: int) -> Any:
    with ir.InsertionPoint(pack), pack.location:
        index = ir.IndexType.get(pack.context)
        value = ir.IntegerAttr.get(index, number)
        return ir.Operation.create("arith.constant", results=[index], attributes={"value": value}).result
