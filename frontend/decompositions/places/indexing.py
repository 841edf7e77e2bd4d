# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Indexing, padding and the gradient of a table of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from retrograd.frontend.decompositions.convolutions.im2col import is_static
from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition
from retrograd.frontend.decompositions.places.masked_writes import is_mask, put_masked
from retrograd.frontend.decompositions.places.whole_rows import find_rows
from retrograd.frontend.decompositions.sums import HALF

aten = torch.ops.aten

_INDEX_ADD: Callable[..., Any] = get_decompositions([aten.index_add.default])[aten.index_add.default]


def _count(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The indices, each of the axis at its place, from the first element on."""
    return [
        index if index is None else torch.where(index < 0, index + x.shape[axis], index)
        for axis, index in enumerate(_in_one_type(indices))
    ]


def _in_one_type(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The indices, those of narrow integers as 64-bit ones: torch-mlir has all of them in one list. Masks stay."""
    narrow = (torch.int8, torch.int16, torch.int32)
    return [index.to(torch.int64) if index is not None and index.dtype in narrow else index for index in indices]


def index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """``aten.index.Tensor``; ``NotImplemented`` where no index is narrower than 64 bits."""
    wide = _in_one_type(indices)
    same = all(mine is given for mine, given in zip(wide, indices, strict=True))
    return NotImplemented if same else aten.index.Tensor(x, wide)


# Whether the indices of the index_put at hand are known to be at least zero.
_COUNTED = ContextVar("_COUNTED", default=False)


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """``aten.index_put``: indices below zero count from the end, which IREE's scatter would leave out; of masks
    torch-mlir would make indices, the first element's for what is not chosen. For the rest see ``put_counted``."""
    if any(index is not None and index.numel() == 0 for index in indices):
        return x.clone()
    if any(map(is_mask, indices)):
        return put_masked(x, indices, values, accumulate)
    if not _COUNTED.get():
        return put_counted(x, _count(x, indices), values, accumulate)
    return _put(x, indices, values, accumulate)


def put_counted(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """``aten.index_put`` with indices that are at least zero."""
    token = _COUNTED.set(True)
    try:
        written: Tensor = aten.index_put.default(x, indices, values, accumulate)
    finally:
        _COUNTED.reset(token)
    return written


def _put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """With axes left out, the indexed axes are brought to the front, and back. Half types are added up in f32.

    Returns ``NotImplemented`` where torch-mlir's own lowering holds: no axis left out before an index, and indices with
    one axis of open size at the most.
    """
    if accumulate and x.dtype in HALF:
        return aten.index_put.default(x.float(), indices, values.float(), True).to(x.dtype)
    indexed = [axis for axis, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    spots = torch.broadcast_tensors(*given)
    if indexed == list(range(len(indexed))):
        if sum(not is_static((size,)) for size in spots[0].shape) < 2:
            return NotImplemented
        # Of several open axes torch-mlir takes all but the first to be of size one.
        flat = values.expand(*spots[0].shape, *x.shape[len(given) :]).flatten(0, spots[0].dim() - 1)
        return aten.index_put.default(x, [spot.flatten() for spot in spots], flat, accumulate)
    rank, shape = spots[0].dim(), list(spots[0].shape)
    kept = [axis for axis in range(x.dim()) if axis not in indexed]
    first = indexed[0]
    if indexed == list(range(first, first + len(indexed))):
        # Neighbouring indices leave their axes where they stood; others come first.
        whole = [*x.shape[:first], *shape, *x.shape[indexed[-1] + 1 :]]
        order = [*range(first, first + rank), *range(first), *range(first + rank, len(whole))]
        updates = values.expand(whole).permute(order)
    else:
        updates = values.expand([*shape, *(x.shape[axis] for axis in kept)])
    order = indexed + kept
    back = [order.index(axis) for axis in range(x.dim())]
    return aten.index_put.default(x.permute(order), list(spots), updates, accumulate).permute(back)


def constant_pad_nd(x: Tensor, pad: Sequence[int], value: float = 0) -> Any:
    """``aten.constant_pad_nd`` with negative amounts as slices; ``NotImplemented`` if there are none.

    Of an amount that is open, such as the one in the backward of a pad to the longest sequence, the sign is that of the
    sizes that are traced, which becomes a condition on them.
    """
    if not any(amount < 0 for amount in pad):
        return NotImplemented
    for position in range(len(pad) // 2):
        dim = x.dim() - 1 - position
        before, after = (-amount if amount < 0 else 0 for amount in pad[2 * position : 2 * position + 2])
        if before != 0 or after != 0:
            x = aten.slice.Tensor(x, dim, before, x.shape[dim] - after, 1)
    rest = [0 if amount < 0 else amount for amount in pad]
    return aten.constant_pad_nd.default(x, rest, value) if any(amount != 0 for amount in rest) else x.clone()


def embedding_dense_backward(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """``aten.embedding_dense_backward``: ``grad [*indices, D]`` added up into ``[num_weights, D]``, in f32 for half
    types.
    """
    rows = indices.flatten()
    updates = grad.reshape(-1, grad.shape[-1])
    if grad.dtype in HALF:
        updates = updates.float()
    if scale_grad_by_freq:
        ones = torch.ones_like(rows, dtype=updates.dtype)
        counts = put_counted(updates.new_zeros(num_weights), [rows], ones, True)
        updates = updates / counts.index_select(0, rows).unsqueeze(-1)
    if padding_idx >= 0:
        updates = torch.where((rows == padding_idx).unsqueeze(-1), 0, updates)
    table = updates.new_zeros(num_weights, updates.shape[-1])
    return put_counted(table, [rows], updates, True).to(grad.dtype)


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Any:
    """``aten.index_add``: of an index without axes, PyTorch's form makes one axis too few."""
    return _INDEX_ADD(x, dim, index if index.dim() else index.reshape(1), source, alpha=alpha)


def scatter(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    """``aten.scatter.src``: ``x`` with ``src`` written to the places ``index`` along ``dim``."""
    return _scatter(x, dim, index, src, accumulate=False)


def scatter_value(x: Tensor, dim: int, index: Tensor, value: float) -> Any:
    """``aten.scatter.value``: ``x`` with one number written to the places ``index`` along ``dim``."""
    return _scatter(x, dim, index, x.new_full((), value), accumulate=False)


def scatter_add(x: Tensor, dim: int, index: Tensor, src: Tensor) -> Any:
    """``aten.scatter_add``: ``x`` with ``src`` added at the places ``index`` along ``dim``."""
    return _scatter(x, dim, index, src, accumulate=True)


def _scatter(x: Tensor, dim: int, index: Tensor, src: Tensor, *, accumulate: bool) -> Tensor:
    """Scatter as ``index_put``: along the other axes, an element of ``index`` stands for the place it is at, but where
    it names whole rows."""
    if x.dim() == 0 or index.dim() == 0:
        whole = _scatter(
            x.reshape(-1), 0, index.reshape(-1), src.reshape(-1) if src.dim() else src, accumulate=accumulate
        )
        return whole.reshape(x.shape)
    if index.numel() == 0:
        return x.clone()
    for axis, length in enumerate(index.shape if src.dim() else ()):
        src = aten.slice.Tensor(src, axis, 0, length)
    along = dim % x.dim()
    if (rows := find_rows(x, along, index)) is not None:
        return put_counted(x, [*[None] * along, rows.to(torch.int64)], src.expand(index.shape), accumulate)
    spots = [
        index.to(torch.int64)
        if axis == along
        else torch.arange(length, device=x.device).reshape(-1, *[1] * (x.dim() - 1 - axis))
        for axis, length in enumerate(index.shape)
    ]
    return put_counted(x, list(torch.broadcast_tensors(*spots)), src.expand(index.shape), accumulate)


def slice_scatter(
    x: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """``aten.slice_scatter`` of neighbours where sizes are open: each element is ``x``'s or that of ``src``, by its
    place along ``dim``."""
    start = 0 if start is None else start
    if is_static((*x.shape, *src.shape)) or step != 1 or (isinstance(start, int) and start < 0):
        return NotImplemented
    length = src.shape[dim]
    place = torch.arange(x.shape[dim], device=x.device) - start
    inside = ((place >= 0) & (place < length)).reshape(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
    spread = src.index_select(dim, torch.minimum(place.clamp(min=0), torch.full_like(place, length - 1)))
    return torch.where(inside, spread, x)


def diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """``aten.diagonal_scatter``: ``x`` with ``src`` (``[..., length]``) on a diagonal of its axes ``dim1`` and
    ``dim2``."""
    dim1, dim2 = dim1 % x.dim(), dim2 % x.dim()
    order = [axis for axis in range(x.dim()) if axis not in (dim1, dim2)] + [dim1, dim2]
    back = [order.index(axis) for axis in range(x.dim())]
    height, width = x.shape[dim1], x.shape[dim2]
    rows = torch.arange(height, device=x.device).unsqueeze(-1)
    columns = torch.arange(width, device=x.device)
    # Above the main diagonal an element is known by its row, below it by its column.
    along, length = (-1, height) if offset >= 0 else (-2, width)
    spread = aten.constant_pad_nd.default(src, [0, length - src.shape[-1]], 0).unsqueeze(along)
    return torch.where(columns - rows == offset, spread, x.permute(order)).permute(back)


def diagonal_backward(grad: Tensor, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Tensor:
    """``aten.diagonal_backward``: zeros of ``input_sizes`` with ``grad`` on the diagonal."""
    return diagonal_scatter(grad.new_zeros(input_sizes), grad, offset, dim1, dim2)


def replication_pad_backward(grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """``aten.replication_pad1d_backward`` to ``_3d``: what was padded is added to the element that it repeats."""
    for position in range(len(padding) // 2):
        axis = x.dim() - 1 - position
        size = x.shape[axis]
        place = torch.arange(grad.shape[axis], device=grad.device) - padding[2 * position]
        rows = grad.movedim(axis, -1)
        # A negative amount leaves elements out, which then have no gradient.
        here = place.clamp(0, size - 1) == torch.arange(size, device=grad.device).unsqueeze(-1)
        grad = torch.where(here, rows.unsqueeze(-2), 0.0).sum(-1).movedim(-1, axis)
    return grad.contiguous()


def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """``aten.put``: ``source`` written to the places ``index`` of the flattened ``x``."""
    flat, place = x.reshape(-1), index.reshape(-1)
    return aten.index_put.default(flat, [place], source.reshape(-1), accumulate).reshape(x.shape)


def take(x: Tensor, index: Tensor) -> Tensor:
    """``aten.take``: the elements at the places ``index`` of the flattened ``x``, in the shape of ``index``."""
    taken: Tensor = aten.index.Tensor(x.reshape(-1), [index.reshape(-1)]).reshape(index.shape)
    return taken


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """``aten.roll``: along an axis of two elements, a turn by an odd number is a flip. ``NotImplemented`` without such
    an axis. Without ``dims``, it is that of the elements in a row."""
    if not dims:
        return aten.roll.default(x.reshape(-1), shifts, [0]).reshape(x.shape)
    turns = [(shift, dim % x.dim()) for shift, dim in zip(shifts, dims, strict=False)]
    pairs = {dim for _, dim in turns if isinstance(x.shape[dim], int) and x.shape[dim] == 2}
    if not pairs:
        return NotImplemented
    others = [(shift, dim) for shift, dim in turns if dim not in pairs]
    if others:
        x = aten.roll.default(x, [shift for shift, _ in others], [dim for _, dim in others])
    odd = [dim for dim in sorted(pairs) if sum(shift for shift, axis in turns if axis == dim) % 2]
    return x.flip(odd) if odd else x.clone()


_ONE_FORM = "torch-mlir's lowering ends the process for a negative axis, refuses scalars, and loops over unknown sizes"
_LEFT_OUT = (
    "torch-mlir leaves out what is written to indices below zero, refuses indices that stand apart or are "
    "of several types, ends the process where there are none, and is slow with axes left out before the first"
)

ENTRIES = (
    Decomposition(aten.index.Tensor, index, "torch-mlir refuses indices of several types"),
    Decomposition(aten.index_put.default, index_put, _LEFT_OUT),
    Decomposition(aten._unsafe_index_put.default, index_put, _LEFT_OUT),
    Decomposition(aten.index_add.default, index_add, "PyTorch's form fails for an index without axes"),
    Decomposition(aten.scatter.src, scatter, _ONE_FORM),
    Decomposition(aten.scatter.value, scatter_value, _ONE_FORM),
    Decomposition(aten.scatter_add.default, scatter_add, _ONE_FORM),
    Decomposition(
        aten.slice_scatter.default, slice_scatter, "IREE fails to compile several of them in a row with open sizes"
    ),
    Decomposition(aten.diagonal_scatter.default, diagonal_scatter, NO_LOWERING),
    Decomposition(
        aten.diagonal_backward.default, diagonal_backward, "PyTorch's form goes by diagonal_scatter, or in place"
    ),
    *(
        Decomposition(op, replication_pad_backward, NO_LOWERING)
        for op in (
            aten.replication_pad1d_backward.default,
            aten.replication_pad2d_backward.default,
            aten.replication_pad3d_backward.default,
        )
    ),
    Decomposition(aten.put.default, put, NO_LOWERING),
    Decomposition(
        aten.roll.default,
        roll,
        "IREE disagrees with itself about the shape of two halves of one element, and torch-mlir needs an axis",
    ),
    Decomposition(aten.take.default, take, "PyTorch's form makes a Python number of a single place"),
    Decomposition(aten.constant_pad_nd.default, constant_pad_nd, "torch-mlir refuses negative amounts"),
    Decomposition(
        aten.embedding_dense_backward.default,
        embedding_dense_backward,
        "PyTorch's form checks every index against the bounds, which eager refuses anyway, and takes a fifth longer",
    ),
)
