# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes where a mask is set. Only the mask's contents say which elements those are, so all that its shape allows are
looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import Decomposition
from retrograd.frontend.python.source_locations import CaptureError

aten = torch.ops.aten


def is_mask(index: Tensor | None) -> bool:
    """Whether what a tensor is indexed by says so for each element."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def put_masked(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """``aten.index_put`` by one mask: ``x [*before, *mask, *behind]`` with ``values`` written, or added, where it is
    set.

    ``values`` broadcast against ``[*before, count, *behind]``; the first of several along ``count`` is for the first
    element that is chosen. That there are as many as elements are chosen, which eager makes sure of, is taken for
    granted.

    Raises:
        CaptureError: there are other indices beside the mask.
    """
    given = [index for index in indices if index is not None]
    if len(given) != 1:
        raise CaptureError(
            "a tensor is written to by a mask and other indices at once: how many elements that are depends on the "
            "mask's contents",
            "index by the mask alone: one of the tensor's shape, or x[:, i][mask] = ... for an index i",
        )
    mask = given[0].bool()
    first = next(axis for axis, index in enumerate(indices) if index is not None)
    behind = x.dim() - first - mask.dim()
    axis = values.dim() - 1 - behind
    if axis >= 0:
        chosen = values if values.shape[axis] == 1 else values.index_select(axis, _places(mask, values.shape[axis]))
        spread = mask.shape if chosen is not values else [1] * mask.dim()
        values = chosen.reshape([*values.shape[:axis], *spread, *values.shape[axis + 1 :]])
    written = x + values if accumulate else values
    return torch.where(mask.reshape([*mask.shape, *[1] * behind]), written, x)


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """``aten.masked_scatter``: ``x`` with the elements of ``source``, in order, where ``mask`` is set; both are
    broadcast."""
    x, mask = torch.broadcast_tensors(x, mask)
    if not x.numel() or not source.numel():
        return x.clone()
    places = _places(mask, source.numel())
    return torch.where(mask, source.reshape(-1).index_select(0, places).reshape(mask.shape), x)


def masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """``aten.masked_scatter_backward``: the elements of ``grad`` where ``mask`` is set, in order, as a tensor of
    ``sizes``, which may be larger."""
    chosen = mask.expand(grad.shape).flatten()
    count = math.prod(sizes)
    place = torch.cumsum(chosen.to(torch.int64), 0) - 1
    # What is not chosen goes to one element behind the last.
    target = torch.where(chosen, place, count)
    rows = aten.index_put.default(grad.new_zeros(count + 1), [target], grad.flatten())
    return rows[:count].reshape(sizes)


def _places(mask: Tensor, count: int) -> Tensor:
    """For each element of ``mask``, the number of the chosen one that it is, where it is chosen; one of ``count``."""
    return (mask.flatten().to(torch.int64).cumsum(0) - 1).clamp(0, count - 1)


_NO_COUNT = "torch-mlir refuses a mask of more axes, and writes to the first element for each that is not chosen"

ENTRIES = (
    Decomposition(aten.masked_scatter.default, masked_scatter, _NO_COUNT),
    Decomposition(aten.masked_scatter_backward.default, masked_scatter_backward, "torch-mlir has no lowering for it"),
)
