# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds what objects of the user hold without running any code of theirs: no property, no iterator of a class's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

from retrograd.frontend.doors.unregistered_objects import PLAIN

# How many objects are looked at from one on, and how many that one of them holds.
_MOST = 1000
_NOT_LOOKED_INTO = (*PLAIN, FunctionType, MethodType, ModuleType, torch.nn.Module, torch.Tensor)


def reach(value: Any) -> Iterator[Any]:
    """An object and those that its attributes and items lead to, nearest first, a thousand at most: none that are
    plain, functions, modules or tensors. Objects may hold one another."""
    seen: dict[int, Any] = {}
    waiting = deque([value])
    while waiting and len(seen) < _MOST:
        each = waiting.popleft()
        if id(each) not in seen and not issubclass(type(each), _NOT_LOOKED_INTO):
            seen[id(each)] = each
            yield each
            waiting.extend(islice(_held_by(each), _MOST))


def _held_by(value: Any) -> Iterator[Any]:
    kind = type(value)
    if issubclass(kind, dict):
        yield from _first(dict.values(value))
    elif issubclass(kind, list):
        yield from _first(list.__iter__(value))
    elif issubclass(kind, tuple):
        yield from _first(tuple.__iter__(value))
    try:
        # Not by the class's own way to look attributes up.
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        table = {}
    if isinstance(table, dict):
        yield from _first(dict.values(table))
    for base in kind.__mro__:
        for slot in [each for each in vars(base).values() if type(each) is MemberDescriptorType]:
            try:
                yield slot.__get__(value, kind)
            except AttributeError:
                # It is not set.
                continue


def _first(values: Any) -> list[Any]:
    """Taken out at once: another thread may change what holds them."""
    return list(islice(values, _MOST))
