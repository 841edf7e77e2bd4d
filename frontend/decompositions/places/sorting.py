# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sorting and selecting by arithmetic: ranks by comparison for short rows, a bitonic network for long ones.

The rank of an element is the number of elements in front of it. All ranks of a row take n * n comparisons that fuse
into one reduction and are never in memory: up to a few thousand elements that compiles in a
fraction of the time and is faster than anything that moves them.
Longer rows go through Batcher's bitonic network (*Sorting networks and their applications*, AFIPS 1968), whose
log2(n) * (log2(n) + 1) / 2 steps are elementwise on views.

The order is PyTorch's: stable, NaN above all numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition

aten = torch.ops.aten

# From this length on the network's steps take less than the comparisons of all pairs.
NETWORK_LENGTH = 2048
# Twice as long a row adds a dozen steps of ten ops each: past this, graphs of thousands.
LONGEST = 1 << 15


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> Any:
    """``aten.sort``: the sorted values and their places (int64), both of ``x``'s shape."""
    return _sorted(x, dim, descending)


def sort_stable(x: Tensor, *, stable: bool | None = False, dim: int = -1, descending: bool = False) -> Any:
    """``aten.sort.stable``: see ``sort``, which is stable in any case."""
    return _sorted(x, dim, descending)


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """``aten.topk``: the ``k`` first values in order and their places; of equal ones those with the lowest places."""
    return _sorted(x, dim, largest, k)


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """``aten.kthvalue``: the ``k``-th smallest value, from 1, and its place."""
    return _selected(x, dim, keepdim, lambda row: torch.full_like(row[..., :1], k - 1, dtype=torch.int64))


def median(x: Tensor, dim: int, keepdim: bool = False) -> Any:
    """``aten.median.dim``: the lower of the middle values and its place; of the first NaN where there is one."""

    def place(row: Tensor) -> Tensor:
        middle = (row.shape[-1] - 1) // 2
        numbers = (~torch.isnan(row)).sum(-1, keepdim=True)
        return torch.where(numbers == row.shape[-1], middle, numbers)

    return _selected(x, dim, keepdim, place)


def nanmedian(x: Tensor, dim: int, keepdim: bool = False) -> Any:
    """``aten.nanmedian.dim``: the median of what is no NaN, and its place; of a NaN where there is nothing else."""

    def place(row: Tensor) -> Tensor:
        numbers = (~torch.isnan(row)).sum(-1, keepdim=True)
        return torch.where(numbers == 0, 0, (numbers - 1).clamp(min=0) // 2)

    return _selected(x, dim, keepdim, place)


def median_of_all(x: Tensor) -> Any:
    """``aten.median``: of all elements."""
    return _of_all(x, median)


def nanmedian_of_all(x: Tensor) -> Any:
    """``aten.nanmedian``: of all elements that are no NaN."""
    return _of_all(x, nanmedian)


def mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> Any:
    """``aten.mode``: the most frequent value, of several the smallest, and the last place where it stands."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    row = _row(x, dim)
    if not _is_short(row):
        return NotImplemented
    this, other = row.unsqueeze(-1), row.unsqueeze(-2)
    frequency = (this == other).to(torch.int32).sum(-1, dtype=torch.int32)
    often = frequency == frequency.amax(-1, keepdim=True)
    # Among the most frequent, the one that no other is smaller than; of equal ones, the last.
    later = torch.arange(row.shape[-1], device=x.device)
    beaten = _is_before(other, this, descending=False) | ((this == other) & (later > later.unsqueeze(-1)))
    rivals = (beaten & often.unsqueeze(-2)).to(torch.int32).sum(-1, dtype=torch.int32)
    places = _place_where(often & (rivals == 0))
    return _taken(row, places.unsqueeze(-1), x, dim, keepdim)


def _sorted(x: Tensor, dim: int, descending: bool, count: int | None = None) -> Any:
    row = _row(x, dim)
    length = row.shape[-1]
    if not isinstance(length, int) or length > LONGEST:
        return NotImplemented
    wanted = length if count is None or x.dim() == 0 else count
    if length <= 1 or x.numel() == 0:
        values = row[..., :wanted]
        places = torch.zeros_like(values, dtype=torch.int64)
    elif _is_short(row):
        ranks = _ranks(row, descending)
        order = torch.arange(wanted, dtype=torch.int32, device=x.device)
        places = _place_where(ranks.unsqueeze(-2) == order.unsqueeze(-1))
        values = row.gather(-1, places)
    else:
        values, places = (t[..., :wanted] for t in _network(row, descending))
    if x.dim() == 0:
        return x.clone(), places.reshape(())
    return values.movedim(-1, dim).contiguous(), places.movedim(-1, dim).contiguous()


def _selected(x: Tensor, dim: int, keepdim: bool, choose: Callable[[Tensor], Tensor]) -> Any:
    """One element of each row in order, and its place: the one whose rank ``choose`` gives (``[..., 1]``)."""
    row = _row(x, dim)
    length = row.shape[-1]
    if not isinstance(length, int) or length > LONGEST or x.numel() == 0:
        return NotImplemented
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    chosen = choose(row)
    if _is_short(row):
        places = _place_where(_ranks(row, descending=False) == chosen).unsqueeze(-1)
    else:
        places = _network(row, descending=False)[1].gather(-1, chosen)
    return _taken(row, places, x, dim, keepdim)


def _of_all(x: Tensor, function: Callable[..., Any]) -> Any:
    found = function(x.reshape(-1), 0) if x.numel() else NotImplemented
    return found if found is NotImplemented else found[0]


def _row(x: Tensor, dim: int) -> Tensor:
    """``x`` with the axis to sort along last."""
    return x.reshape(1) if x.dim() == 0 else x.movedim(dim, -1)


def _is_short(row: Tensor) -> bool:
    return isinstance(row.shape[-1], int) and row.shape[-1] < NETWORK_LENGTH


def _taken(row: Tensor, places: Tensor, x: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    pair = row.gather(-1, places), places
    values, places = (t.movedim(-1, dim) if keepdim else t.squeeze(-1) for t in pair)
    return values.contiguous(), places.contiguous()


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


def _network(row: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    """Values and places of each row in order, ``[..., n]`` both."""
    length = row.shape[-1]
    padded = 1 << (length - 1).bit_length()
    # Padding comes last: no number is behind it, and its places are behind those of its equals.
    values = aten.constant_pad_nd.default(row, [0, padded - length], _last(row.dtype, descending))
    places = torch.arange(padded, dtype=torch.int32, device=row.device).expand(values.shape)
    size = 2
    while size <= padded:
        distance = size // 2
        while distance:
            values, places = _exchanged(values, places, size, distance, descending)
            distance //= 2
        size *= 2
    return values[..., :length], places[..., :length].to(torch.int64)


def _exchanged(values: Tensor, places: Tensor, size: int, distance: int, descending: bool) -> tuple[Tensor, Tensor]:
    """One step of the network: elements ``distance`` apart, in order or, in every other block of ``size``, in
    reverse."""
    lead, length = values.shape[:-1], values.shape[-1]
    pairs = length // (2 * distance)
    low, high = values.reshape(*lead, pairs, 2, distance).unbind(-2)
    low_place, high_place = places.reshape(*lead, pairs, 2, distance).unbind(-2)
    swapped = _is_before(high, low, descending=descending) | (
        ~_is_before(low, high, descending=descending) & (high_place < low_place)
    )
    blocks = torch.arange(pairs, device=values.device) // (size // (2 * distance)) % 2 == 1
    swapped = swapped ^ blocks.unsqueeze(-1)
    return (
        torch.stack([torch.where(swapped, high, low), torch.where(swapped, low, high)], -2).reshape(values.shape),
        torch.stack(
            [torch.where(swapped, high_place, low_place), torch.where(swapped, low_place, high_place)], -2
        ).reshape(values.shape),
    )


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
    if not isinstance(row.shape[-1], int) or row.shape[-1] > LONGEST:
        return NotImplemented
    row = row if sorter is None else row.gather(-1, sorter)
    row = row if row.dim() == 1 else row.unsqueeze(-2)
    # NaN belongs at the end.
    behind = row > values.unsqueeze(-1) if right or side == "right" else row >= values.unsqueeze(-1)
    return (~behind).sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def bucketize(values: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Any:
    """``aten.bucketize``: as `searchsorted`, of ``values`` of any shape."""
    return searchsorted(boundaries, values, out_int32=out_int32, right=right)


def _last(dtype: torch.dtype, descending: bool) -> float | int | bool:
    if dtype.is_floating_point:
        return -math.inf if descending else math.nan
    if dtype is torch.bool:
        return not descending
    return torch.iinfo(dtype).min if descending else torch.iinfo(dtype).max


_ABORTS = "torch-mlir's lowering of it ends the process, and IREE's sorts element by element, one exchange at a time"

ENTRIES = (
    Decomposition(aten.sort.default, sort, _ABORTS),
    Decomposition(aten.sort.stable, sort_stable, _ABORTS),
    Decomposition(aten.topk.default, topk, _ABORTS),
    Decomposition(aten.kthvalue.default, kthvalue, _ABORTS),
    Decomposition(aten.median.dim, median, NO_LOWERING),
    Decomposition(aten.nanmedian.dim, nanmedian, NO_LOWERING),
    Decomposition(aten.median.default, median_of_all, NO_LOWERING),
    Decomposition(aten.nanmedian.default, nanmedian_of_all, NO_LOWERING),
    Decomposition(aten.mode.default, mode, NO_LOWERING),
    Decomposition(aten.searchsorted.Tensor, searchsorted, NO_LOWERING),
    Decomposition(aten.bucketize.Tensor, bucketize, NO_LOWERING),
)
