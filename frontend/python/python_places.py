# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Python values that a program was compiled with, looked at before each call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

import numpy as np


class _Absent:
    """No value, where there may be any."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


class Table(Protocol):
    """Where values are found by name."""

    def get(self, name: str, default: Any = None, /) -> Any:
        """The value of that name."""
        ...


class Environment:
    """Variables of the environment by name."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def get(self, name: str, default: Any = None, /) -> Any:
        """As of a dict."""
        return self._variables.get(name, default)


class Settings:
    """Results of functions without arguments, by their names."""

    def __init__(self, settings: Mapping[str, Callable[[], Any]]) -> None:
        self._settings = settings

    def get(self, name: str, default: Any = None, /) -> Any:
        """As of a dict."""
        return self._settings[name]() if name in self._settings else default


class Items:
    """The contents of a dict or a list, by key or by place."""

    def __init__(self, container: dict[Any, Any] | list[Any]) -> None:
        self._container = container

    def get(self, name: Any, default: Any = None, /) -> Any:
        """As of a dict."""
        try:
            return self._container[name]
        except (KeyError, IndexError):
            return default


class Slots:
    """Attributes of an object that are in no dict, by name."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def get(self, name: str, default: Any = None, /) -> Any:
        """As of a dict."""
        return getattr(self._owner, name, default)


class OfClass:
    """Attributes that objects of a class have from it and its bases, by name."""

    def __init__(self, kind: type) -> None:
        self._tables = [vars(base) for base in kind.__mro__]

    def get(self, name: str, default: Any = None, /) -> Any:
        """As of a dict."""
        return next((table[name] for table in self._tables if name in table), default)


@dataclass(frozen=True)
class Place:
    """Where a value is looked up, ``table`` by ``name``, and what it was; ``path`` says where that is."""

    path: str
    table: Table
    name: str
    value: Any


class PythonValues:
    """The values that a program was compiled with. ``tensors`` are where the model may have found tensors, whose
    values are weak references to these."""

    def __init__(self, places: tuple[Place, ...] = (), tensors: tuple[Place, ...] = ()) -> None:
        self.places = places
        self.tensors = tensors
        # A call looks at hundreds of them.
        self._checks = [(place.table.get, place.name, place.value) for place in places]

    def are_as_before(self) -> bool:
        """Whether all of them are as they were."""
        for get, name, value in self._checks:
            found = get(name, ABSENT)
            if found is not value and not is_same_value(found, value):
                return False
        return True

    def are_those_of(self, other: PythonValues) -> bool:
        """Whether the other ones are the same values, at the same places."""
        found, others = ({place.path: place.value for place in values.places} for values in (self, other))
        return found.keys() == others.keys() and all(
            is_same_value(value, others[path]) for path, value in found.items()
        )

    def find_changed(self) -> list[str]:
        """Those that are others now, each with what it was and what it is."""
        return [
            f"{p.path} ({p.value!r}, now {found!r})"
            for p in self.places
            if not is_same_value(found := p.table.get(p.name, ABSENT), p.value)
        ]


def is_plain(value: Any) -> bool:
    """Whether it is a number or a text, and no tensor and nothing that has one."""
    return isinstance(value, bool | int | float | complex | str)


def is_same_value(a: Any, b: Any) -> bool:
    """Whether two Python values are the same to a program: of one type and equal, not-a-number included, and zeros of
    one sign; arrays by what is in them, functions by their code and what it refers to."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_same_value(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same_value, a, b))
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
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        # Of tensors, or of objects that do not say.
        return False


def _parts(function: FunctionType) -> tuple[Any, ...]:
    # A function may be in its own closure.
    contents = [_content(cell) for cell in function.__closure__ or ()]
    cells = [id(content) if isinstance(content, FunctionType) else content for content in contents]
    return function.__code__, function.__defaults__, function.__kwdefaults__, cells


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # The variable is not set yet.
        return ABSENT


class Cell:
    """The variable of a closure, as a table of one name."""

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def get(self, _name: str, default: Any = None, /) -> Any:
        """As of a dict."""
        value = _content(self._cell)
        return default if value is ABSENT else value
