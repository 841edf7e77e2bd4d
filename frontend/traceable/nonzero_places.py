# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``torch.where(mask)`` and ``mask.nonzero()``, of which only the mask's contents say how many, as selections.

``x[rows]`` of such indices is a selection again, and ``out.index_add(0, rows, values)`` adds what is chosen, and zero
for the rest: a mixture of experts, each on the rows that chose it, is one graph, and computes every expert on all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.python.argument_answers import computed
from retrograd.frontend.traceable.masked_selections import Selection, is_same_choice, refusal


def where(condition: Any, *others: Any, **named: Any) -> Any:
    """``torch.where(mask)``; ``NotImplemented`` for the one of three arguments."""
    return NotImplemented if others or named else _places(condition, "where")


def nonzero(x: Any, *, out: Tensor | None = None, as_tuple: bool = False) -> Any:
    """``x.nonzero()`` of truth values or integers, ``[n, axes]`` or one index for each axis; ``NotImplemented`` for
    others."""
    indices = NotImplemented if out is not None else _places(x, "nonzero")
    if indices is NotImplemented or as_tuple:
        return indices
    return indices[0].having(torch.stack([index.rows for index in indices], -1))


def _places(mask: Any, name: str) -> Any:
    """An index for each axis of ``mask``: where it is set."""
    if isinstance(mask, Selection):
        raise refusal(name)
    if (
        not isinstance(mask, Tensor)
        or mask.is_floating_point()
        or mask.is_complex()
        or not mask.dim()
        or not mask.numel()
    ):
        return NotImplemented
    if mask.dtype is not torch.bool:
        mask = computed(Tensor.ne, mask, 0)
    grids = torch.meshgrid([torch.arange(size, device=mask.device) for size in mask.shape], indexing="ij")
    return tuple(Selection.of(grid, mask) for grid in grids)


def select_places(x: Any, key: Any) -> Any:
    """``x[rows]``, ``x[rows, slots, None]``: by chosen indices of the first axes, then numbers, slices and
    new axes. ``NotImplemented`` where no index is chosen by a mask.

    Raises:
        CaptureError: they stand elsewhere, are of several masks, or beside other indices.
    """
    keys = key if isinstance(key, tuple) else (key,)
    indices = [part for part in keys if isinstance(part, Selection)]
    if not indices:
        return NotImplemented
    rest = keys[len(indices) :]
    plain = all(part is None or part is Ellipsis or type(part) in (int, slice) for part in rest)
    if not isinstance(x, Tensor) or not plain:
        raise refusal("x[...]", "beside other indices")
    _check_indices("x[...]", indices, indices[0])
    return indices[0].having(x[(*(index.rows for index in indices), *rest)])


def index_add(x: Any, dim: Any, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    """``x.index_add(0, rows, values)`` of chosen indices and values; ``NotImplemented`` where none is chosen."""
    given = _values_to_add(x, dim, index, source)
    return given if given is NotImplemented else x.index_add(dim, *given, alpha=alpha)


def index_add_(x: Any, dim: Any, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    """`index_add`, in place."""
    given = _values_to_add(x, dim, index, source)
    return given if given is NotImplemented else x.index_add_(dim, *given, alpha=alpha)


def _values_to_add(x: Any, dim: Any, index: Any, source: Any) -> Any:
    """Indices and values of all elements, the values zero where they are not chosen."""
    if not isinstance(index, Selection) and not isinstance(source, Selection):
        return NotImplemented
    if not isinstance(x, Tensor) or not isinstance(index, Selection) or not isinstance(source, Selection) or dim != 0:
        raise refusal("index_add", "along another axis, or of what is not chosen by one mask")
    _check_indices("index_add", [index], source)
    _check_values("index_add", index, source)
    values = source.having(torch.where(source.wide_mask(), source.rows, 0))
    return index.flat(), values.flat()


def set_places(x: Tensor, indices: Sequence[Selection], value: Any) -> None:
    """``x[rows] = values``, ``x[rows, slots] = values``: by chosen indices of the first axes, to chosen values, or
    to one value for all of them. What is not chosen goes to a place behind the last. Of several values for one place
    the last stays, and each has that place's gradient, as in PyTorch."""
    _check_indices("x[...] = y", indices, indices[0])
    axes, mask = len(indices), indices[0].mask
    if axes > x.dim():
        raise IndexError(f"too many indices for a tensor of {x.dim()} axes")
    count, element = math.prod(x.shape[:axes]), x.shape[axes:]
    places = torch.zeros_like(mask, dtype=torch.int64)
    is_inside = torch.ones_like(mask)
    for index, size in zip(indices, x.shape, strict=False):
        places = places * size + torch.where(index.rows < 0, index.rows + size, index.rows)
        is_inside = is_inside & (index.rows >= -size) & (index.rows < size)
    # Out of range on one axis is out of range, where the place would be one of another row.
    places = torch.where(is_inside, places, count + 1)
    places = torch.where(mask, places, count).flatten()
    values = _values_to_set(indices, value, x).expand(places.shape[0], *element)
    behind = torch.cat([x.reshape(count, *element), x.new_zeros(1, *element)])
    x.copy_(behind.index_put((places,), values)[:count].reshape(x.shape))


def _values_to_set(indices: Sequence[Selection], value: Any, x: Tensor) -> Tensor:
    """Make what is broadcast to a value for each place."""
    if isinstance(value, Selection):
        _check_values("x[...] = y", indices[0], value)
        return value.flat().to(x.dtype)
    one = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    if one.dim() > x.dim() - len(indices) and one.shape[:1] != (1,):
        raise refusal("x[...] = y", "with a tensor that is not chosen from")
    return one


def _check_values(name: str, index: Selection, value: Selection) -> None:
    if not is_same_choice(value, index.mask, index.version):
        raise refusal(name, "of indices that two masks choose")
    if not value.memory:
        raise refusal(name, "of elements that were written to in place by another name")


def _check_indices(name: str, indices: Sequence[Selection], first: Selection) -> None:
    if any(index.behind or index.dtype not in (torch.int64, torch.int32) for index in indices):
        raise refusal(name, "by what is no index for each element")
    if not all(index.memory and is_same_choice(index, first.mask, first.version) for index in indices):
        raise refusal(name, "of indices that two masks choose")
