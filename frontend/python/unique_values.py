# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``torch.unique`` and ``torch.unique_consecutive`` of what is computed from arguments alone, of as many elements as an
answer about these says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Ask = Callable[[Tensor, Callable[[Tensor], Any]], Any]


def unique(
    ask: Ask,
    input: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """Compute ``torch.unique``; ``None`` where ``ask`` cannot tell how many values there are, or for values along an
    axis."""
    size = ask(input, lambda x: torch.unique(x).numel()) if dim is None and isinstance(input, Tensor) else None
    if size is None:
        return None
    values, order = input.detach().flatten().sort()
    found, places, counts = _find_first(values, size)
    inverse = torch.zeros_like(order).scatter(0, order, places).view(input.shape) if return_inverse else None
    return _given(found, inverse, counts if return_counts else None)


def unique_consecutive(
    ask: Ask, input: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Compute ``torch.unique_consecutive``; ``None`` where :func:`unique` gives it."""
    told = dim is None and isinstance(input, Tensor)
    size = ask(input, lambda x: torch.unique_consecutive(x).numel()) if told else None
    if size is None:
        return None
    found, places, counts = _find_first(input.detach().flatten(), size)
    return _given(found, places.view(input.shape) if return_inverse else None, counts if return_counts else None)


def _find_first(values: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first of each run of equal values, of which there are ``size``; the number of each value's run, and how long
    each is."""
    if not size:
        return values, torch.zeros_like(values, dtype=torch.int64), values.new_zeros(0, dtype=torch.int64)
    is_first = torch.cat([values.new_ones(1, dtype=torch.bool), values[1:] != values[:-1]])
    runs = is_first.long().cumsum(0) - 1
    counts = runs.new_zeros(size).scatter_add(0, runs, torch.ones_like(runs))
    return values.index_select(0, counts.cumsum(0) - counts), runs, counts


def _given(found: Tensor, inverse: Tensor | None, counts: Tensor | None) -> Any:
    parts = [part for part in (found, inverse, counts) if part is not None]
    return parts[0] if len(parts) == 1 else tuple(parts)
