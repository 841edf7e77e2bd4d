# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensors of a backward that are the same piece of memory, or repeat one, which compiled code takes once.

A cell that is run ten times saved ten tensors that are its transposed weight, and four that are parts of each of its
projections: 38 of the 96 tensors of a GRU's backward. Each of them would be laid out, handed over and read by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter, sub
from typing import Any

import torch

from retrograd.frontend.autograd.steps.layouts import Expanded, Layout, Part, find_expanded

_address_of = torch.Tensor.data_ptr
# Of each tensor of which another has the storage, or that repeats its own: its number, the first one that has it, where
# it begins, its strides, and the size of the storage.
Shared = tuple[tuple[int, int, int, tuple[int, ...], int], ...]


def find_shared(inputs: Sequence[torch.Tensor], numbers: Sequence[int]) -> Shared:
    """Find the tensors, of those with these numbers, of which another has the storage, or that repeat their own, and
    how they lie in it."""
    groups: dict[int, list[int]] = {}
    for number in numbers:
        tensor = inputs[number]
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        # Views that read their memory otherwise are taken by themselves.
        if is_plain and not _is_read_otherwise(tensor) and tensor.data_ptr():
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
    found = []
    for group in groups.values():
        size = inputs[group[0]].untyped_storage().nbytes()
        for number in group:
            tensor = inputs[number]
            if len(group) == 1 and find_expanded(tensor) is None:
                continue
            found.append((number, group[0], int(tensor.storage_offset()), tensor.stride(), size))
    return tuple(found)


def find_merged(
    numbers: Sequence[int], inputs: Sequence[torch.Tensor], bases: Sequence[torch.Tensor]
) -> dict[int, int]:
    """Find, of tensors with these numbers, which share memory, those that the graph takes as another one: of which the
    ``bases``, what is laid out as the graph takes it, have the same elements in the same order. Maps their numbers to
    that of the other."""
    first: dict[tuple[int, int, torch.dtype], int] = {}
    merged: dict[int, int] = {}
    for number in numbers:
        base = bases[number]
        # What was copied to be laid out is memory of its own.
        lies_in_it = base.untyped_storage().data_ptr() == inputs[number].untyped_storage().data_ptr()
        if not (lies_in_it and base.is_contiguous()) or _is_read_otherwise(base):
            continue
        key = base.data_ptr(), base.numel(), base.dtype
        other = first.setdefault(key, number)
        if other != number:
            merged[number] = other
    return merged


def _is_read_otherwise(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers are the conjugate or the negative ones of those in its memory."""
    return tensor.is_conj() or tensor.is_neg()


class MergedGuard:
    """Whether tensors lie as when those that are ``merged`` were, and those that repeat memory, given that their
    strides and dispatch keys, among which are those of conjugates and negatives, are as they were then."""

    __slots__ = ("_distances", "_firsts", "_others", "_wholes", "numbers")

    def __init__(
        self, merged: Mapping[int, int], layouts: Mapping[int, Layout], inputs: Sequence[torch.Tensor]
    ) -> None:
        # Those whose strides have to be as they were.
        repeated = [number for number, how in layouts.items() if isinstance(how, Expanded)]
        self.numbers = frozenset({*merged, *merged.values(), *repeated})
        self._others, self._firsts = gather([*merged]), gather([*merged.values()])
        # How far from the tensor that is taken each other one begins.
        self._distances = self._measure(inputs)
        self._wholes = [
            (number, inputs[number].storage_offset(), inputs[number].untyped_storage().nbytes())
            for number in sorted({*merged.values()})
            if isinstance(layouts.get(number), Part)
        ]

    def _measure(self, inputs: Sequence[torch.Tensor]) -> list[int]:
        return [*map(sub, map(_address_of, self._others(inputs)), map(_address_of, self._firsts(inputs)))]

    def holds(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether they lie so."""
        if self._measure(inputs) != self._distances:
            return False
        for number, offset, size in self._wholes:
            tensor = inputs[number]
            if tensor.storage_offset() != offset or tensor.untyped_storage().nbytes() != size:
                return False
        return True


def gather(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Makes a function that takes elements; of one number or none, the tuple that `itemgetter` does not give."""
    if not numbers:
        return lambda elements: ()
    return itemgetter(*numbers) if len(numbers) > 1 else itemgetter(slice(numbers[0], numbers[0] + 1))
