# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Python values as they were, and whether others are the same to a program."""

from __future__ import annotations

import array
import functools
import math
import operator
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MappingProxyType, MemberDescriptorType
from typing import Any

import numpy as np
import torch

from retrograd.frontend.python.python_tables import ABSENT, contents_of

# Containers whose items are values of the model's, with those of Python's classes that hold one of these.
_KEYED = (dict, MappingProxyType, UserDict, ChainMap)
_LISTED = (list, tuple, deque, UserList)
_SETS = (set, frozenset)
_ITERATED = (list, tuple, deque, *_SETS)
CONTAINERS = (*_KEYED, *_LISTED, *_SETS)
# Arrays of more bytes are not copied, and known by being the same object.
_COMPARED = 2**24
_BYTES = (bytearray, array.array)
# Of which equal ones are the same.
_EQUAL = (bool, int, str, bytes)


class _AnyTensor:
    """A tensor, whichever it is."""

    def __repr__(self) -> str:
        return "a tensor"


A_TENSOR = _AnyTensor()


@dataclass(frozen=True)
class Contents:
    """Holds what was in a container: its class, the keys of a dict in their order, and the values, which are neither
    containers that can change, other than ``Contents``, nor tensors."""

    kind: type
    keys: tuple[Any, ...] | None
    values: tuple[Any, ...] | frozenset[Any]

    def are_in(self, found: Any) -> bool:
        """Whether a container has the same in it."""
        if type(found) is not self.kind:
            return False
        keys, values = _taken_apart(found)
        if len(values) != len(self.values) or (keys is not None and not _are_same(keys, self.keys or ())):
            return False
        return _are_same(values, self.values)

    def holds_itself(self, found: Any) -> bool:
        """Whether a container that has the same in it has no other object for one that may be written to; its dicts
        are not looked at."""
        _, values = _taken_apart(found)
        return all(
            known.holds_itself(value) if isinstance(known, Contents) else is_itself(value, known)
            for known, value in zip(self.values, values, strict=True)
        )

    def is_same(self, other: Contents) -> bool:
        """Whether both are of equal containers."""
        if self.kind is not other.kind or len(self.values) != len(other.values) or self.keys != other.keys:
            return False
        return _are_same(self.values, other.values)

    def __repr__(self) -> str:
        if self.keys is not None:
            return repr(dict(zip(self.keys, self.values, strict=True)))
        return repr(self.values if self.kind is tuple else list(self.values))


def as_it_was(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Give what a value is compared with later: itself, or a copy of what may be written to."""
    if isinstance(value, torch.Tensor):
        return A_TENSOR
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= _COMPARED else value
    if isinstance(value, functools.partial):
        args = tuple(map(_argument, value.args))
        return _PartialWas(value.func, args, {name: _argument(part) for name, part in value.keywords.items()})
    if isinstance(value, _BYTES):
        return value[:]
    if not isinstance(value, CONTAINERS) or id(value) in above:
        return value
    keys, values = _taken_apart(value)
    if isinstance(values, frozenset):
        return Contents(type(value), keys, values)
    return Contents(type(value), keys, tuple(as_it_was(part, (*above, id(value))) for part in values))


def _argument(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) else as_it_was(value)


def changes_within(value: Any, above: tuple[int, ...] = ()) -> bool:
    """Whether something may be written to within a value that shows in no dict's number, other than in attributes."""
    if isinstance(value, (np.ndarray, functools.partial, *_BYTES)):
        return True
    if not isinstance(value, CONTAINERS) or id(value) in above:
        return False
    if not isinstance(value, tuple | dict | frozenset) or isinstance(value, OrderedDict):
        return True
    return any(changes_within(part, (*above, id(value))) for part in items_of(value).values())


def dicts_within(value: Any, above: tuple[int, ...] = ()) -> Iterator[dict[Any, Any]]:
    """The dicts among the containers that a value is made of."""
    if isinstance(value, CONTAINERS) and id(value) not in above:
        if isinstance(value, dict):
            yield value
        for part in items_of(value).values():
            yield from dicts_within(part, (*above, id(value)))


def items_of(container: Any) -> dict[Any, Any]:
    """Give the values in a container, by the key that leads to each."""
    keys, values = _taken_apart(container)
    return dict(zip(range(len(values)) if keys is None else keys, values, strict=True))


def _taken_apart(container: Any) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | frozenset[Any]]:
    if isinstance(container, dict):
        return tuple(dict.keys(container)), tuple(dict.values(container))
    if isinstance(container, Mapping):
        return tuple(container), tuple(container.values())
    # By the methods of Python's own class: others may give something else, or nothing at all.
    own = next((kind for kind in _ITERATED if isinstance(container, kind)), type(container))
    return None, (frozenset if own in _SETS else tuple)(own.__iter__(container))


@dataclass(frozen=True)
class _PartialWas:
    """A function with some arguments, as it was."""

    function: Any
    args: Any
    keywords: Any

    def is_same(self, other: _PartialWas) -> bool:
        """Whether another was the same."""
        parts = ((self.function, other.function), (self.args, other.args), (self.keywords, other.keywords))
        return all(is_same_value(a, b) for a, b in parts)

    def are_in(self, found: Any) -> bool:
        """Whether a function has these arguments."""
        return isinstance(found, functools.partial) and self.is_same(as_it_was(found))

    def __repr__(self) -> str:
        return f"partial({self.function!r}, {self.args!r}, {self.keywords!r})"


@dataclass(frozen=True)
class EitherOf:
    """Stands for a value of which the program does the same for each of ``values``."""

    values: tuple[Any, ...]

    def is_same(self, other: EitherOf) -> bool:
        """Whether another is for the same values."""
        return is_same_value(self.values, other.values)

    def are_in(self, found: Any) -> bool:
        """Whether a value is one of them."""
        return any(is_same_value(found, value) for value in self.values)

    def __repr__(self) -> str:
        return " or ".join(map(repr, self.values))


def _are_same(a: tuple[Any, ...] | frozenset[Any], b: tuple[Any, ...] | frozenset[Any]) -> bool:
    if isinstance(a, frozenset) or isinstance(b, frozenset):
        return a == b
    return len(a) == len(b) and (all(map(operator.is_, a, b)) or all(map(is_same_value, a, b)))


def is_itself(found: Any, known: Any) -> bool:
    """Whether a value that is the same is the same object, or none that may be written to."""
    return found is known or known is A_TENSOR or is_plain(found)


def is_plain(value: Any) -> bool:
    """Whether it is a number or a text, and no tensor and nothing that has one."""
    return isinstance(value, bool | int | float | complex | str)


def is_same_value(found: Any, known: Any) -> bool:
    """Whether a Python value is to a program what another is, or was: of one type and equal, not-a-number included, and
    zeros of one sign; arrays by what is in them, functions by their code and what it refers to."""
    if found is known:
        return True
    if known is A_TENSOR:
        return isinstance(found, torch.Tensor)
    if isinstance(known, Contents | _PartialWas | EitherOf):
        return known.is_same(found) if type(found) is type(known) else known.are_in(found)  # type: ignore[arg-type]
    return type(found) is type(known) and _is_same_of_type(found, known)


def _is_same_of_type(a: Any, b: Any) -> bool:
    if isinstance(a, dict | list | tuple):
        (keys, values), (other_keys, others) = _taken_apart(a), _taken_apart(b)
        return keys == other_keys and _are_same(values, others)
    if isinstance(a, torch.Tensor):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, FunctionType):
        return a.__globals__ is b.__globals__ and is_same_value(_parts(a), _parts(b))
    if isinstance(a, functools.partial):
        return is_same_value((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, complex):
        return is_same_value((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if type(a) in _EQUAL:
        return bool(a == b)
    try:
        return bool(a == b) and is_same_value(_attributes(a), _attributes(b))
    except (TypeError, ValueError, RuntimeError):
        # Of objects that do not say.
        return False


def slots_of(kind: type) -> set[str]:
    """The names of attributes for which objects of a class have a place that is in no dict."""
    return {
        name for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, MemberDescriptorType)
    }


def _attributes(value: Any) -> tuple[Any, ...]:
    """Give what the attributes of an object hold, which may be more than what it is compared by."""
    return getattr(value, "__dict__", None), *(getattr(value, name, ABSENT) for name in sorted(slots_of(type(value))))


def _parts(function: FunctionType) -> tuple[Any, ...]:
    # A function may be in its own closure.
    contents = [contents_of(cell) for cell in function.__closure__ or ()]
    cells = [id(content) if isinstance(content, FunctionType) else content for content in contents]
    return function.__code__, function.__defaults__, function.__kwdefaults__, cells
