# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Ops along an axis of a tensor that has none, as PyTorch takes a scalar for a row of one element; axes of one element
that are taken away; broadcasting; and pieces along an axis whose size is open, a slice each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch_mlir.extras.fx_decomp_util import get_decomposition_table

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition

aten = torch.ops.aten

# Where the result of the op on one element is a scalar in any case.
_REDUCED = {aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.prod.dim_int}
_WITH_AXIS = (
    aten._softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.index_select.default,
    *_REDUCED,
)
_TABLE = get_decomposition_table()


def as_row(op: OpOverload) -> Callable[..., Any]:
    """``op`` with each scalar among its tensors as a row of one element; otherwise what torch-mlir's table has."""

    def function(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim():
            return _TABLE[op](x, *args, **kwargs) if op in _TABLE else NotImplemented
        rows = pytree.tree_map_only(Tensor, lambda t: t.reshape(1) if t.dim() == 0 else t, (x, *args))
        # Only a gather takes the shape of its index.
        scalar = not (op is aten.gather.default and args[1].dim())
        result = op(*rows, **kwargs)
        return pytree.tree_map_only(Tensor, lambda t: t.reshape(()) if scalar else t, result)

    return function


def squeeze(x: Tensor, axes: Sequence[int]) -> Any:
    """``aten.squeeze.dims`` as one view; by an op for each axis where a size is a symbol, which is not asked."""
    if not all(isinstance(size, int) for size in x.shape):
        return torch._refs.squeeze(x, tuple(axes))
    gone = {axis % max(x.dim(), 1) for axis in axes}
    return aten.view.default(x, [size for axis, size in enumerate(x.shape) if axis not in gone or size != 1])


def logical_or(x: Tensor, y: Tensor) -> Any:
    """``aten.logical_or`` of two shapes, broadcast."""
    return torch.bitwise_or(*torch.broadcast_tensors(x != 0, y != 0)) if x.shape != y.shape else NotImplemented


def fmax(x: Tensor, y: Tensor) -> Any:
    """``aten.fmax``: the larger of two numbers, and that one which is a number where the other is NaN."""
    return torch.where(torch.isnan(y) | (x >= y), x, y) if x.dtype.is_floating_point else NotImplemented


def fmin(x: Tensor, y: Tensor) -> Any:
    """``aten.fmin``: the smaller of two numbers, and that one which is a number where the other is NaN."""
    return torch.where(torch.isnan(y) | (x <= y), x, y) if x.dtype.is_floating_point else NotImplemented


def split(x: Tensor, size: int, dim: int = 0) -> Any:
    """``aten.split``: pieces of ``size`` along ``dim``, the last of what is left; the number of pieces is settled by
    the trace."""
    whole = x.shape[dim]
    if not _is_open(whole, size):
        return NotImplemented
    count = max(int((whole + size - 1) // size), 1)
    return _slices(x, [*[size] * (count - 1), whole - size * (count - 1)], dim)


def split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> Any:
    """``aten.split_with_sizes``: pieces of each of ``sizes`` along ``dim``."""
    return _slices(x, sizes, dim) if _is_open(x.shape[dim], *sizes) else NotImplemented


def unsafe_split(x: Tensor, size: int, dim: int = 0) -> Any:
    """``aten.unsafe_split``: as `split`, whatever the sizes."""
    return aten.split.Tensor(x, size, dim)


def unsafe_split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> Any:
    """``aten.unsafe_split_with_sizes``: as `split_with_sizes`, whatever the sizes."""
    return aten.split_with_sizes.default(x, sizes, dim)


def _slices(x: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    start = 0
    pieces = []
    for size in sizes:
        pieces.append(aten.slice.Tensor(x, dim, start, start + size))
        start = start + size
    return pieces


def _is_open(*sizes: int) -> bool:
    return any(isinstance(size, torch.SymInt) for size in sizes)


_UNPACKED = "torch-mlir does not unpack a list of tensors whose sizes are open"


ENTRIES = (
    Decomposition(aten.split.Tensor, split, _UNPACKED),
    Decomposition(aten.unsafe_split.Tensor, unsafe_split, NO_LOWERING),
    Decomposition(aten.split_with_sizes.default, split_with_sizes, _UNPACKED),
    Decomposition(aten.unsafe_split_with_sizes.default, unsafe_split_with_sizes, NO_LOWERING),
    Decomposition(
        aten.squeeze.dims, squeeze, "PyTorch takes an op for each axis: nine of each batch norm, which are traced"
    ),
    Decomposition(aten.fmax.default, fmax, "torch-mlir does not broadcast it"),
    Decomposition(aten.fmin.default, fmin, "torch-mlir does not broadcast it"),
    *(
        Decomposition(op, as_row(op), "torch-mlir refuses a tensor of no axis, or does not come to an end")
        for op in _WITH_AXIS
    ),
    Decomposition(aten.logical_or.default, logical_or, "torch-mlir does not broadcast it"),
)
