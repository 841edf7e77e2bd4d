# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensors in pieces along an axis whose size is open: a slice for each piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition

aten = torch.ops.aten


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
)
