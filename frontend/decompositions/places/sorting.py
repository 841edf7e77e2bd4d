# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sorting by arithmetic, where PyTorch is not to do it: in files, and of whole numbers.

The rank of an element is the number of elements in front of it. All ranks of a row take n * n comparisons that fuse
into one reduction and are never in memory. The order is PyTorch's: stable, NaN above all numbers. Longer rows, medians
and modes are left to PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition

aten = torch.ops.aten

LONGEST = 2048
"""The most elements of a row: 1,500 of them take three times as long as PyTorch's kernel."""
LONGEST_SEARCHED = 1 << 15
"""The most elements of a row that is searched."""


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> Any:
    """``aten.sort``: the sorted values and their places (int64), both of ``x``'s shape."""
    return _sorted(x, dim, descending)


def sort_stable(x: Tensor, *, stable: bool | None = False, dim: int = -1, descending: bool = False) -> Any:
    """``aten.sort.stable``: see ``sort``, which is stable in any case."""
    return _sorted(x, dim, descending)


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """``aten.topk``: the ``k`` first values in order and their places; of equal ones those with the lowest places."""
    return _sorted(x, dim, largest, k)


def _sorted(x: Tensor, dim: int, descending: bool, count: int | None = None) -> Any:
    row = _row(x, dim)
    length = row.shape[-1]
    if not isinstance(length, int) or length > LONGEST:
        return NotImplemented
    wanted = length if count is None or x.dim() == 0 else count
    if length <= 1 or x.numel() == 0:
        values = row[..., :wanted]
        places = torch.zeros_like(values, dtype=torch.int64)
    else:
        order = torch.arange(wanted, dtype=torch.int32, device=x.device)
        places = _place_where(_ranks(row, descending).unsqueeze(-2) == order.unsqueeze(-1))
        values = row.gather(-1, places)
    if x.dim() == 0:
        return x.clone(), places.reshape(())
    return values.movedim(-1, dim).contiguous(), places.movedim(-1, dim).contiguous()


def _row(x: Tensor, dim: int) -> Tensor:
    """``x`` with the axis to sort along last."""
    return x.reshape(1) if x.dim() == 0 else x.movedim(dim, -1)


def _is_before(a: Tensor, b: Tensor, *, descending: bool) -> Tensor:
    """Whether ``a`` comes before ``b`` and is not equal to it."""
    if descending:
        a, b = b, a
    if not a.dtype.is_floating_point:
        return _numbers(a) < _numbers(b)
    return (a < b) | (torch.isnan(b) & ~torch.isnan(a))


def _numbers(x: Tensor) -> Tensor:
    return x.to(torch.int32) if x.dtype is torch.bool else x


def _ranks(row: Tensor, descending: bool) -> Tensor:
    """``[..., n]`` int32: how many elements of its row come before each element."""
    this, other = row.unsqueeze(-1), row.unsqueeze(-2)
    number = torch.arange(row.shape[-1], device=row.device)
    earlier = number < number.unsqueeze(-1)
    before = _is_before(other, this, descending=descending)
    tied = ~_is_before(this, other, descending=descending) & earlier
    return (before | tied).to(torch.int32).sum(-1, dtype=torch.int32)


def _place_where(marks: Tensor) -> Tensor:
    """``[...]`` int64: the place of the one mark in each row of ``[..., n]``."""
    number = torch.arange(marks.shape[-1], dtype=torch.int32, device=marks.device)
    return torch.where(marks, number, 0).sum(-1, dtype=torch.int32).to(torch.int64)


def searchsorted(
    row: Tensor,
    values: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Any:
    """``aten.searchsorted``: where in the sorted ``row [..., n]``, or in one for all, each of ``values [..., m]``
    belongs: as many elements are in front of it as are smaller, or (``right``) as large. ``sorter`` sorts ``row``."""
    if not isinstance(row.shape[-1], int) or row.shape[-1] > LONGEST_SEARCHED:
        return NotImplemented
    row = row if sorter is None else row.gather(-1, sorter)
    row = row if row.dim() == 1 else row.unsqueeze(-2)
    # NaN belongs at the end.
    behind = row > values.unsqueeze(-1) if right or side == "right" else row >= values.unsqueeze(-1)
    return (~behind).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def bucketize(values: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Any:
    """``aten.bucketize``: as `searchsorted`, of ``values`` of any shape."""
    return searchsorted(boundaries, values, out_int32=out_int32, right=right)


_ABORTS = "torch-mlir's lowering of it ends the process, and IREE's sorts element by element, one exchange at a time"

ENTRIES = (
    Decomposition(aten.sort.default, sort, _ABORTS),
    Decomposition(aten.sort.stable, sort_stable, _ABORTS),
    Decomposition(aten.topk.default, topk, _ABORTS),
    Decomposition(aten.searchsorted.Tensor, searchsorted, NO_LOWERING),
    Decomposition(aten.bucketize.Tensor, bucketize, NO_LOWERING),
)
