# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensors of a backward that are the same piece of memory, which compiled code takes once.

A cell that is run ten times saved ten tensors that are its transposed weight, and four that are parts of each of its
projections: 38 of the 96 tensors of a GRU's backward. Each of them would be laid out, handed over and read by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from retrograd.frontend.autograd.steps.layouts import Layout, Part

# Of each tensor of which another has the storage: its number, the first one that has it, where it begins, its strides,
# and the size of the storage.
Shared = tuple[tuple[int, int, int, tuple[int, ...], int], ...]


def find_shared(inputs: Sequence[torch.Tensor], numbers: Sequence[int]) -> Shared:
    """Find the tensors, of those with these numbers, of which another has the storage, and how they lie in it."""
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
        for number in group if len(group) > 1 else ():
            tensor = inputs[number]
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
    """Whether tensors lie as when those that are ``merged`` were, given that their strides are as they were then."""

    __slots__ = ("_distances", "_wholes", "numbers")

    def __init__(
        self, merged: Mapping[int, int], layouts: Mapping[int, Layout], inputs: Sequence[torch.Tensor]
    ) -> None:
        addresses = {number: inputs[number].data_ptr() for number in {*merged, *merged.values()}}
        # Those whose strides have to be as they were.
        self.numbers = frozenset(addresses)
        groups: dict[int, list[tuple[int, int]]] = {}
        for number, other in merged.items():
            groups.setdefault(other, []).append((number, addresses[number] - addresses[other]))
        # Of each one that is taken, the others, and how far from it they begin.
        self._distances = [*groups.items()]
        self._wholes = [
            (number, inputs[number].storage_offset(), inputs[number].untyped_storage().nbytes())
            for number in sorted({*merged.values()})
            if isinstance(layouts.get(number), Part)
        ]

    def holds(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether they lie so."""
        for other, places in self._distances:
            start = inputs[other].data_ptr()
            if _is_read_otherwise(inputs[other]):
                return False
            for number, distance in places:
                tensor = inputs[number]
                if tensor.data_ptr() - start != distance or _is_read_otherwise(tensor):
                    return False
        for number, offset, size in self._wholes:
            tensor = inputs[number]
            if tensor.storage_offset() != offset or tensor.untyped_storage().nbytes() != size:
                return False
        return True
