# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads what values are saved as: a narrower type, what a function of the user's packs them to, or themselves."""

from __future__ import annotations

from collections.abc import Mapping

from retrograd.contract.attributes import BWD_PACKED_AS
from retrograd.contract.formats import narrowed_bytes
from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import element_type

# The narrower type that an op's results are saved in.
STORED = "bwd.saved_dtype"


def stored_bytes(value: ir.OpResult, shape: tuple[int, ...] | None, packed: Mapping[str, int]) -> int | None:
    """Bytes of a result of an op when it is saved in a narrower type, or packed by a function of which ``packed`` has
    the bytes; ``None`` if it is saved as it is."""
    format = stored_format(value, shape)
    return (
        packed.get(packed_as(value))
        if format is None
        else narrowed_bytes(format, shape or (), element_type(value.type))
    )


def stored_format(value: ir.OpResult, shape: tuple[int, ...] | None) -> str | None:
    """The narrower type that a result of an op is saved in; ``None`` where it would take no fewer bytes."""
    if STORED not in value.owner.attributes or shape is None:
        return None
    format = str(ir.StringAttr(value.owner.attributes[STORED]).value)
    return None if narrowed_bytes(format, shape, element_type(value.type)) is None else format


def packed_as(value: ir.OpResult) -> str:
    """The name of the function that packs a result of an op; empty if none does."""
    if BWD_PACKED_AS not in value.owner.attributes:
        return ""
    return str(ir.StringAttr(ir.ArrayAttr(value.owner.attributes[BWD_PACKED_AS])[value.result_number]).value)
