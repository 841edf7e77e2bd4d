# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How the eager forward left the tensors that a backward takes, and how compiled code takes them without a copy.

Compiled functions take contiguous memory. The transpose of a weight, or the part of a projection that is the keys of
an attention, is none, and would be copied at each step: 19 of a GPT's tensors, more than half of its backward's time.
The graph takes what is contiguous, and transposes, slices or expands by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Protocol

import torch

from retrograd.frontend.decompositions.views.strided import find_window
from retrograd.frontend.doors.outputs import find_order

# Memory of which a tensor is a smaller part than this is not taken for its sake.
_MOST_TIMES = 4
# Elements below which an expanded tensor is copied as fast as it is asked how it lies.
_LEAST_EXPANDED = 1 << 14


class Layout(Protocol):
    """How a tensor lies in memory."""

    def base(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that :meth:`view` makes ``tensor`` of; it is contiguous where ``tensor`` lies as this
        says."""

    def view(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor that :meth:`base` is of."""


@dataclass(frozen=True)
class Permuted:
    """All of a piece of memory, with its axes in another order."""

    order: tuple[int, ...]

    def base(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with its axes in the order of memory."""
        return tensor.permute(self.order)

    def view(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor with its axes as they were."""
        return base.permute([self.order.index(axis) for axis in range(len(self.order))])


@dataclass(frozen=True)
class Part:
    """A regular part of a piece of memory that is ``whole``."""

    whole: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @cached_property
    def _form(self) -> tuple[list[int], int]:
        """The strides of the whole, and how many elements it has."""
        return [prod(self.whole[axis + 1 :]) for axis in range(len(self.whole))], prod(self.whole)

    def base(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole, where the tensor is this part of it, or a copy."""
        strides, count = self._form
        lies_so = tensor.stride() == self.stride and tensor.storage_offset() == self.offset
        if lies_so and tensor.untyped_storage().nbytes() == count * tensor.element_size():
            return tensor.as_strided(self.whole, strides, 0)
        whole = tensor.new_zeros(self.whole)
        whole.as_strided(self.size, self.stride, self.offset).copy_(tensor)
        return whole

    def view(self, base: torch.Tensor) -> torch.Tensor:
        """The part."""
        return base.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class Expanded:
    """A piece of memory that is repeated along some axes. One that lies otherwise may hold other numbers there: whoever
    takes tensors so has to ask for the strides of each."""

    kept: tuple[int, ...]
    size: tuple[int, ...]

    def base(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with one element along the axes that repeat it."""
        return tensor.as_strided(self.kept, tensor.stride())

    def view(self, base: torch.Tensor) -> torch.Tensor:
        """The tensor with all of them."""
        return base.expand(self.size)


def find_expanded(tensor: torch.Tensor) -> Expanded | None:
    """How a large tensor that is contiguous memory, repeated along some axes, lies; None for any other."""
    if tensor.numel() < _LEAST_EXPANDED or tensor.is_conj() or tensor.is_neg():
        return None
    lengths = tuple([1 if step == 0 else size for size, step in zip(tensor.shape, tensor.stride(), strict=True)])
    if lengths == tuple(tensor.shape) or not tensor.as_strided(lengths, tensor.stride()).is_contiguous():
        return None
    return Expanded(lengths, tuple(tensor.shape))


def find_layout(tensor: torch.Tensor) -> Layout | None:
    """How a tensor lies; None where it is contiguous, or in none of these ways."""
    if tensor.is_contiguous() or not tensor.numel() or tensor.is_conj() or tensor.is_neg() or not tensor.dim():
        return None
    strides = [step for count, step in zip(tensor.shape, tensor.stride(), strict=True) if count > 1]
    if 0 in strides:
        return find_expanded(tensor)
    order = find_order(tensor.stride()).outer_to_inner
    if tensor.permute(order).is_contiguous():
        return Permuted(order)
    elements, rest = divmod(tensor.untyped_storage().nbytes(), tensor.element_size())
    whole = _find_whole(strides, elements)
    if rest or whole is None or elements > _MOST_TIMES * tensor.numel():
        return None
    part = Part(whole, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
    return None if find_window(whole, part.size, part.stride, part.offset) is None else part


def _find_whole(strides: Sequence[int], elements: int) -> tuple[int, ...] | None:
    """The shape of memory along whose axes these strides go."""
    steps = [elements, *sorted(set(strides), reverse=True)]
    if steps[-1] != 1:
        steps.append(1)
    if any(outer % inner for outer, inner in pairwise(steps)):
        return None
    return tuple([outer // inner for outer, inner in pairwise(steps)])
