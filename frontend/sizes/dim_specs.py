# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``dynamic_shapes=``, in the notation of ``torch.export`` and checked as torch checks it, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.exc import UserError
from torch.export import Dim
from torch.export.dynamic_shapes import (
    _check_dynamic_shapes,
    _combine_args,
    _DerivedDim,
    _DimHint,
    _DimHintType,
    _tree_map_with_path,
)
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo

from retrograd.frontend.python.source_locations import CaptureError

LIMIT = 2**62
"""Sizes of this and above are without a bound: no tensor has as many elements."""


@dataclass(frozen=True)
class DimSpec:
    """A user's demand on one axis: a name, or none; the least and the most; whether the size may turn out to be fixed.
    A size that is derived from another, ``root``, is ``factor * root + offset``; its name is that of the expression."""

    name: str | None
    least: int
    most: int | None
    may_be_fixed: bool
    root: str | None = None
    factor: int = 1
    offset: int = 0

    @property
    def derived(self) -> bool:
        """Whether the size is another than its root."""
        return (self.factor, self.offset) != (1, 0)


def read_dynamic_shapes(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> list[dict[int, DimSpec]]:
    """For each tensor among the arguments, in order, the axes that are open.

    Raises:
        CaptureError: the notation is wrong, or asks for what there is not.
    """
    if not isinstance(dynamic_shapes, dict | list | tuple):
        raise CaptureError(
            f"dynamic_shapes is {dynamic_shapes!r}, no container of what each argument's are",
            "write it as for torch.export.export: {'x': {0: Dim('batch')}}",
        )
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    try:
        _check_dynamic_shapes(_combine_args(model, tuple(args), dict(kwargs)), dynamic_shapes)
        numbered = pytree.tree_unflatten([_Place(i) for i in range(len(leaves))], spec)
        found: dict[int, Any] = {}
        combined = _combine_args(model, *numbered)
        shapes = dict(zip(combined, dynamic_shapes, strict=True)) if _is_sequence(dynamic_shapes) else dynamic_shapes
        _tree_map_with_path(
            lambda path, place, shape: found.update({place.number: shape}), combined, shapes, tree_name="inputs"
        )
    except (UserError, ValueError, TypeError) as error:
        raise CaptureError(
            f"dynamic_shapes: {str(error).strip().splitlines()[0]}", "write it as for torch.export.export"
        ) from error
    return [_axes(found.get(i), leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class _Place:
    """Stands for a leaf of the arguments, by number."""

    number: int


def _is_sequence(shapes: Any) -> bool:
    return isinstance(shapes, (tuple, list))


def _axes(shape: Any, tensor: torch.Tensor) -> dict[int, DimSpec]:
    pairs = shape.items() if isinstance(shape, dict) else enumerate(shape or ())
    found = {axis: _read(dim) for axis, dim in pairs}
    return {axis: spec for axis, spec in found.items() if spec is not None}


def _read(dim: Any) -> DimSpec | None:
    if dim is None or isinstance(dim, int) or (isinstance(dim, _DimHint) and dim.type is _DimHintType.STATIC):
        return None
    if isinstance(dim, _DimHint):
        return DimSpec(None, max(dim.min or 1, 1), dim.max, dim.type is _DimHintType.AUTO)
    if not isinstance(dim, Dim):
        raise CaptureError(f"dynamic_shapes: {dim!r} is no size", "write it as for torch.export.export")
    most = None if dim.max is int_oo or dim.max >= LIMIT else int(dim.max)
    least = max(int(dim.min), 1)
    if not isinstance(dim, _DerivedDim):
        return DimSpec(dim.__name__, least, most, False, root=dim.__name__)
    offset = int(dim.fn(0))
    return DimSpec(dim.__name__, least, most, False, dim.root.__name__, int(dim.fn(1)) - offset, offset)
