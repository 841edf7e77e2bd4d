# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``bwd-pack-scratch``: places the buffers of each function in its block of scratch memory.

Works on ``stream.resource.pack``, which IREE's ``iree-stream-schedule-allocation`` leaves, and replaces what it gives
by constants. IREE's own ``iree-stream-layout-slices`` places buffers in the order they are made in. A pack with a size
that is not a constant is left to it.
"""

from __future__ import annotations

from typing import Any

from iree.compiler import ir

from retrograd.pipelines.analysis.kernels.scratch_layout import Slice, lay_out
from retrograd.pipelines.stream.passes import PassFailure, constant_of, find_ops

NAME = "bwd-pack-scratch"
# Of each buffer, on all devices: IREE's --iree-stream-resource-min-offset-alignment for CPUs.
_ALIGNMENT = 64


def apply(module: Any, *, loose: bool = True) -> None:
    """Rewrite a ``builtin.module`` in place; ``loose`` is as for :func:`lay_out`.

    Raises:
        PassFailure: lifetimes that end before they begin.
    """
    for pack in list(find_ops(module, "stream.resource.pack")):
        slices = _read_slices(pack)
        if slices is not None:
            _replace(pack, slices, loose)


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


def _replace(pack: Any, slices: list[Slice], loose: bool) -> None:
    try:
        layout = lay_out(slices, loose=loose)
    except ValueError as error:
        raise PassFailure(NAME, pack, str(error), "run it right after iree-stream-schedule-allocation") from error
    index = ir.IndexType.get(pack.context)
    with ir.InsertionPoint(pack), pack.location:
        for result, number in zip(pack.results, (layout.size, *layout.offsets), strict=True):
            value = ir.IntegerAttr.get(index, number)
            constant = ir.Operation.create("arith.constant", results=[index], attributes={"value": value})
            result.replace_all_uses_with(constant.result)
    pack.erase()
