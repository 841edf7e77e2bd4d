# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Notes what passes did to collectives, in words, on the module: `explain` says it."""

from __future__ import annotations

from collections.abc import Sequence

from retrograd.dialects import ir

NOTES_ATTRIBUTE = "bwd.collective_notes"


def add_collective_notes(module: ir.Operation, notes: Sequence[str]) -> None:
    """Leave lines on a module, behind those that are there."""
    if notes:
        texts = [*read_collective_notes(module), *notes]
        with module.context:
            module.attributes[NOTES_ATTRIBUTE] = ir.ArrayAttr.get([ir.StringAttr.get(text) for text in texts])


def read_collective_notes(module: ir.Operation) -> tuple[str, ...]:
    """The lines on a module; none where no pass joined or moved anything."""
    if NOTES_ATTRIBUTE not in module.attributes:
        return ()
    return tuple(ir.StringAttr(text).value for text in ir.ArrayAttr(module.attributes[NOTES_ATTRIBUTE]))
