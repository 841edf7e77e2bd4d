# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``embedding_bag``: rows of a table, added up or compared by bags."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from retrograd.frontend.decompositions.entry import NO_LOWERING, Decomposition

aten = torch.ops.aten

_SUM, _MEAN, _MAX = range(3)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``aten._embedding_bag``: the bags ``[bags, d]``; the bag of each index; how many indices each bag has that are
    not padding; which index each maximum came from (its row in the table), for ``mode`` max."""
    starts = offsets[:-1] if include_last_offset else offsets
    bags, place = starts.shape[0], torch.arange(indices.shape[0], device=weight.device)
    bag = _bag_of(place, starts).to(indices.dtype)
    used = indices != padding_idx
    inside = (bag == torch.arange(bags, device=weight.device).unsqueeze(-1)) & used
    count = inside.to(indices.dtype).sum(-1)
    rows = weight.index_select(0, indices)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if mode == _MAX:
        masked = torch.where(inside.unsqueeze(-1), rows, -math.inf)
        best = masked.amax(1)
        # The first of equal ones.
        length = indices.shape[0]
        first = torch.where(inside.unsqueeze(-1) & (masked == best.unsqueeze(1)), place.unsqueeze(-1), length).amin(1)
        chosen = indices.index_select(0, first.clamp(max=length - 1).flatten()).reshape(first.shape)
        some = (count > 0).unsqueeze(-1)
        return torch.where(some, best, 0.0), bag, count, torch.where(some, chosen, -1)
    total = torch.where(inside.unsqueeze(-1), rows, 0.0).sum(1)
    if mode == _MEAN:
        total = total / count.clamp(min=1).to(weight.dtype).unsqueeze(-1)
    return total, bag, count, count


def _bag_of(place: Tensor, starts: Tensor) -> Tensor:
    """The bag of each place among the indices; a start behind all of them begins no bag."""
    return (place.unsqueeze(-1) >= starts).to(starts.dtype).sum(-1) - 1


def _bags(offset2bag: Tensor, offsets: Tensor, indices: Tensor) -> Tensor:
    """The bag of each index, which PyTorch's faster forward on the CPU does not give."""
    if offset2bag.shape[0] == indices.shape[0]:
        return offset2bag
    return _bag_of(torch.arange(indices.shape[0], device=indices.device), offsets)


def embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Any:
    """``aten._embedding_bag_dense_backward``: the gradient of the table, ``[num_weights, d]``.

    PyTorch's kernel for the CPU scales some rows by how often other rows are asked for: with ``scale_grad_by_freq`` the
    op is kept, so that gradients are eager's.
    """
    if scale_grad_by_freq:
        return NotImplemented
    table = grad.new_zeros(num_weights, grad.shape[-1])
    if mode == _MAX:
        chosen = maximum_indices
        columns = torch.arange(grad.shape[-1], device=grad.device).expand(chosen.shape)
        updates = torch.where(chosen < 0, 0.0, grad)
        return aten.index_put.default(table, [chosen.clamp(min=0), columns], updates, True)
    rows = grad.index_select(0, offset2bag)
    if mode == _MEAN:
        rows = rows / bag_size.clamp(min=1).to(grad.dtype).index_select(0, offset2bag).unsqueeze(-1)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    rows = torch.where((indices != padding_idx).unsqueeze(-1), rows, 0.0)
    return aten.index_put.default(table, [indices], rows, True)


def any_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Any:
    """``aten._embedding_bag_backward``: as `embedding_bag_backward`; a sparse gradient is left to PyTorch."""
    if sparse:
        return NotImplemented
    more = (num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx)
    bags = offset2bag if mode == _MAX else _bags(offset2bag, offsets, indices)
    return embedding_bag_backward(grad, indices, bags, bag_size, maximum_indices, *more)


def weights_backward(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    mode: int,
    padding_idx: int = -1,
) -> Tensor:
    """``aten._embedding_bag_per_sample_weights_backward``: the gradient of the weight of each index."""
    bags = _bags(offset2bag, offsets, indices)
    along = (grad.index_select(0, bags) * weight.index_select(0, indices)).sum(-1)
    return torch.where(indices != padding_idx, along, 0.0)


_FORWARD = "torch-mlir gives the bags alone, and the backward needs to know what is in them"

ENTRIES = (
    Decomposition(aten._embedding_bag.default, embedding_bag, _FORWARD),
    Decomposition(aten._embedding_bag_forward_only.default, embedding_bag, _FORWARD),
    Decomposition(aten._embedding_bag_backward.default, any_backward, NO_LOWERING),
    Decomposition(aten._embedding_bag_dense_backward.default, embedding_bag_backward, NO_LOWERING),
    Decomposition(aten._embedding_bag_per_sample_weights_backward.default, weights_backward, NO_LOWERING),
)
