# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Casts between torch tensors of fixed sizes and builtin ones, for ops that stand between ops of torch."""

from __future__ import annotations

from retrograd.dialects import ir
from retrograd.pipelines.analysis.layout.tensor_types import parse_tensor_type
from retrograd.pipelines.transforms.helpers.maker import Maker


def builtin_type(type_: ir.Type) -> ir.Type:
    """The builtin type of a torch tensor of fixed sizes, whose elements have no sign.

    Raises:
        ValueError: it is none.
    """
    known = parse_tensor_type(str(type_))
    if known is None or known.fixed_shape is None:
        raise ValueError(f"{type_} is no tensor of fixed sizes")
    return ir.RankedTensorType.get(list(known.fixed_shape), ir.Type.parse(known.element))


def to_builtin(value: ir.Value, type_: ir.Type | None = None) -> ir.Value:
    """A torch tensor as a builtin one, of ``type_`` where its own has another name there."""
    return Maker().value("torch_c.to_builtin_tensor", [value], builtin_type(value.type) if type_ is None else type_)


def from_builtin(value: ir.Value, type_: ir.Type) -> ir.Value:
    """A builtin tensor as a torch tensor of ``type_``."""
    return Maker().value("torch_c.from_builtin_tensor", [value], type_)
