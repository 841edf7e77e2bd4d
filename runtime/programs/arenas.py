# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tensors that lie one behind another in one storage: a forward gives residuals so, and its backward takes them as one
arena, which it works in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from sys import getrefcount
from typing import Any, NamedTuple

import torch
from torch._C._dynamo import guards

from retrograd.contract.tensors import FunctionSpec, TensorSpec
from retrograd.runtime.programs.tensors import PLAIN_TYPES, is_alone, is_importable, make_allocator

# What Inductor's code calls: a tensor of its own on the storage of another of its type, and no view to autograd.
_reinterpret = guards._reinterpret_tensor  # type: ignore[attr-defined]


class Member(NamedTuple):
    """An argument of a function, by number, or a result; and where it begins, in bytes."""

    number: int
    offset: int


class Arena(NamedTuple):
    """Members that lie one behind another, and the bytes that they have together."""

    size: int
    members: tuple[Member, ...]

    @property
    def first(self) -> int:
        """The member that is given as the whole arena."""
        return self.members[0].number


def read_arenas(said: Iterable[str]) -> tuple[Arena, ...]:
    """The arenas of a function, from what its program says: :data:`BWD_JOINED`."""
    found: dict[int, Arena] = {}
    for text in said:
        first, size, number, offset = map(int, text.split(":"))
        before = found.get(first, Arena(size, ()))
        found[first] = Arena(size, (*before.members, Member(number, offset)))
    return tuple(found.values())


def take_joined(arguments: list[Any], arenas: Iterable[Arena]) -> None:
    """Make the members of each arena lie in one storage that nothing but the list refers to: as they are, or as copies;
    then the first of them all bytes of the arena."""
    for arena in arenas:
        if not _is_joined(arguments, arena):
            _copy_joined(arguments, arena)
        whole = torch.empty(0, dtype=torch.uint8, device="cpu")
        first = arguments[arena.first]
        whole.set_(first.untyped_storage(), first.storage_offset() * first.element_size(), (arena.size,), (1,))
        arguments[arena.first] = whole


def _is_joined(arguments: list[Any], arena: Arena) -> bool:
    """Whether the members of an arena lie in it, and torch knows of nobody else who refers to it."""
    address = arguments[arena.first].data_ptr()
    storage = arguments[arena.first].untyped_storage()
    for number, offset in arena.members:
        # References of the list and of the call of getrefcount.
        if getrefcount(arguments[number]) != 2 or arguments[number]._use_count() != 1:
            return False
        if type(arguments[number]) not in PLAIN_TYPES or not is_importable(arguments[number]):
            return False
        if arguments[number].data_ptr() != address + offset:
            return False
        if arguments[number].untyped_storage()._cdata != storage._cdata:
            return False
    return is_alone(storage, len(arena.members))


def _copy_joined(arguments: list[Any], arena: Arena) -> None:
    """Copy the members of an arena to a new one."""
    storage = torch.empty(arena.size, dtype=torch.uint8, device="cpu").untyped_storage()
    for number, offset in arena.members:
        given = arguments[number].detach()
        place = torch.empty(0, dtype=given.dtype, device="cpu")
        stride = torch.empty(given.shape, device="meta").stride()
        place.set_(storage, offset // given.element_size(), given.shape, stride)
        arguments[number] = place.copy_(given)


class ResultArena:
    """Allocates those results of a forward that the arguments of its backward are which lie in an arena there."""

    __slots__ = ("_allocate", "_forms", "_size", "members")

    def __init__(self, arena: Arena, forward: FunctionSpec, backward: FunctionSpec) -> None:
        places = {result.name: number for number, result in enumerate(forward.results)}
        self._size = arena.size
        self._allocate = make_allocator(TensorSpec("arena", "", (arena.size,), "uint8"), "cpu")
        self._forms: dict[torch.dtype, list[tuple[int, tuple[int, ...], tuple[int, ...], int]]] = {}
        self.members: list[int] = []
        for number, offset in arena.members:
            place = places[backward.arguments[number].name]
            spec = forward.results[place]
            dtype = getattr(torch, spec.dtype)
            form = torch.empty([size for size in spec.shape if isinstance(size, int)], dtype=dtype, device="meta")
            found = (place, (*form.shape,), form.stride(), offset // dtype.itemsize)
            self._forms.setdefault(dtype, []).append(found)
            self.members.append(place)

    def allocate(self, results: list[torch.Tensor]) -> None:
        """Put new tensors into the places of its members among a forward's results."""
        storage = self._allocate().untyped_storage()
        for dtype, forms in self._forms.items():
            base = torch.empty(0, dtype=dtype, device="cpu")
            base.set_(storage, 0, (self._size // dtype.itemsize,), (1,))
            for place, shape, stride, offset in forms:
                results[place] = _reinterpret(base, shape, stride, offset)


def result_arenas(arenas: Sequence[Arena], forward: FunctionSpec, backward: FunctionSpec) -> list[ResultArena]:
    """How a forward allocates what its backward takes in arenas."""
    return [ResultArena(arena, forward, backward) for arena in arenas]
