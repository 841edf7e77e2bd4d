# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where Python values are found by name, each kind of place as a dict would be. ``sources`` are the objects of which
none was written to as long as all that a table gives is the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, Protocol

import torch

from retrograd.frontend.python.written_memory import AttributesOf, dict_of_class


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


class Attributes:
    """Attributes of an object that may be in no dict, by name."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def get(self, name: str, default: Any = None, /) -> Any:
        """As of a dict."""
        return getattr(self._owner, name, default)


class Within:
    """Values in a container behind others, by the keys to it one after the other, from a table that has the
    first."""

    def __init__(self, table: Table, name: str, keys: tuple[Any, ...]) -> None:
        self._table, self._name, self._keys = table, name, keys

    def get(self, key: Any, default: Any = None, /) -> Any:
        """As of a dict."""
        found = self._table.get(self._name, ABSENT)
        try:
            for step in (*self._keys, key):
                found = found[step]
        except (KeyError, IndexError, TypeError):
            return default
        return found


class OfClass:
    """Attributes that a class has itself, and not from its bases, by name."""

    def __init__(self, kind: type) -> None:
        self.sources = (dict_of_class(kind),)

    def get(self, name: str, default: Any = None, /) -> Any:
        """As of a dict."""
        return self.sources[0].get(name, default)


class ClassOf:
    """The class of an object."""

    def __init__(self, owner: Any) -> None:
        self.sources = (owner,)

    def get(self, _name: str, _default: Any = None, /) -> Any:
        """As of a dict."""
        return type(self.sources[0])


@dataclass(frozen=True, eq=False)
class _Itself:
    """A dict that is equal to none but itself."""

    table: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.table is other.table

    def __hash__(self) -> int:
        return id(self.table)

    def __repr__(self) -> str:
        return f"a dict of {len(self.table)}"


class DictOf:
    """Which dict has the attributes of an object."""

    def __init__(self, owner: Any) -> None:
        self.sources = (AttributesOf(owner),)
        self._first = _Itself(owner.__dict__)

    def get(self, _name: str, _default: Any = None, /) -> Any:
        """As of a dict."""
        found = self.sources[0].owner.__dict__
        return self._first if found is self._first.table else _Itself(found)


class BasesOf:
    """A class and its bases in the order in which they are asked."""

    def __init__(self, kind: type) -> None:
        self.sources = (kind,)

    def get(self, _name: str, _default: Any = None, /) -> Any:
        """As of a dict."""
        return self.sources[0].__mro__


class PartsOf:
    """The code and the defaults of a function, as attributes."""

    def __init__(self, function: FunctionType) -> None:
        self.sources = (function,)

    def get(self, name: str, default: Any = None, /) -> Any:
        """As of a dict."""
        return getattr(self.sources[0], name, default)


class Cell:
    """The variable of a closure, as a table of one name."""

    def __init__(self, cell: CellType) -> None:
        self.sources = (cell,)

    def get(self, _name: str, default: Any = None, /) -> Any:
        """As of a dict."""
        try:
            return self.sources[0].cell_contents
        except ValueError:
            # The variable is not set yet.
            return default


class InContext:
    """The value of a variable of the context."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        self._variable = variable

    def get(self, _name: str, default: Any = None, /) -> Any:
        """As of a dict."""
        return self._variable.get(default)


class IsAlive:
    """Whether a weak reference leads to an object, which is not held."""

    def __init__(self, reference: weakref.ref[Any]) -> None:
        self._reference = reference

    def get(self, _name: str, _default: Any = None, /) -> Any:
        """As of a dict."""
        return self._reference() is not None


class Keys:
    """The keys of a dict in their order."""

    def __init__(self, table: dict[Any, Any]) -> None:
        self.sources = (table,)

    def get(self, _name: str, _default: Any = None, /) -> Any:
        """As of a dict."""
        return tuple(self.sources[0])


class OfTensor:
    """Attributes that Python is told of a tensor; the tensor is in a table by name, and may be replaced."""

    def __init__(self, table: Table, tensor: str) -> None:
        self._table, self._tensor = table, tensor

    def get(self, name: str, default: Any = None, /) -> Any:
        """As of a dict."""
        return told_of(self._table.get(self._tensor), name, default)


def told_of(tensor: torch.Tensor | None, name: str, default: Any = None) -> Any:
    """An attribute of a tensor, or what a method of it returns that takes nothing."""
    found = getattr(tensor, name, default)
    return found() if callable(found) else found


# What every module has: its mode, which calls look at by themselves, and tables.
_OF_ALL_MODULES = frozenset(vars(torch.nn.Module()))
# What torch's recurrent layers keep of their parameters, and make anew where these are others than at their last call.
_OF_RECURRENT = frozenset({"_flat_weights", "_flat_weight_refs"})


def torchs_own(owner: Any) -> frozenset[str]:
    """Return the attributes of an object that are PyTorch's own, which says itself what they follow."""
    own = _OF_ALL_MODULES if isinstance(owner, torch.nn.Module) else frozenset()
    return own | _OF_RECURRENT if isinstance(owner, torch.nn.RNNBase) else own


def sources_of(table: Table) -> tuple[Any, ...]:
    """The objects behind a table that a write would show in; none where it would show in none."""
    sources: tuple[Any, ...] = (table,) if isinstance(table, dict) else getattr(table, "sources", ())
    return sources


def keeps_address(table: Table, value: Any, known: Any, kept: tuple[Any, ...]) -> bool:
    """Whether a value of a table stays where it is in memory for as long as what is ``known`` of it and ``kept`` are
    there: what shows a write by its address alone shows none where another value may come to be at the same one."""
    return isinstance(table, dict | OfClass) or known is value or any(source is value for source in kept)
