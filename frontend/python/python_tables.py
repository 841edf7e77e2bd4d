# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where Python values are found by name, each kind of place as in a dict. ``sources`` are the objects of which
none was written to as long as all that a table gives is the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
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

    @property
    def get(self) -> Callable[[str, Any], Any]:
        """Gives the value of a name, or another where there is none."""
        ...


class Lookup:
    """A table whose values a function gives, for a name and what stands for none."""

    def __init__(self, get: Callable[[Any, Any], Any], *sources: Any) -> None:
        self._get, self.sources = get, sources

    def get(self, name: Any, default: Any = None) -> Any:
        """The value of a name, or ``default`` where there is none."""
        return self._get(name, default)


class OfClass(Lookup):
    """Attributes that a class has itself, and not from its bases."""

    def __init__(self, kind: type) -> None:
        table = dict_of_class(kind)
        super().__init__(table.get, table)


def settings_of(settings: Mapping[str, Callable[[], Any]]) -> Lookup:
    """Results of functions without arguments, by their names."""
    return Lookup(lambda name, default: settings[name]() if name in settings else default)


def attributes_of(owner: Any, *sources: Any) -> Lookup:
    """Attributes of an object that may be in no dict."""
    return Lookup(partial(getattr, owner), *sources)


def parts_of(function: FunctionType) -> Lookup:
    """The code and the defaults of a function."""
    return attributes_of(function, function)


def within(table: Table, name: str, keys: tuple[Any, ...]) -> Lookup:
    """Values in a container behind others, by the keys to it one after the other, from a table that has the first."""

    def get(key: Any, default: Any) -> Any:
        found = table.get(name, ABSENT)
        try:
            for step in (*keys, key):
                found = found[step]
        except (KeyError, IndexError, TypeError):
            return default
        return found

    return Lookup(get)


def class_of(owner: Any) -> Lookup:
    """The class of an object."""
    return Lookup(lambda *_: type(owner), owner)


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


def dict_of(owner: Any) -> Lookup:
    """Which dict has the attributes of an object."""
    first = _Itself(owner.__dict__)

    def get(_name: str, _default: Any) -> Any:
        found = owner.__dict__
        return first if found is first.table else _Itself(found)

    return Lookup(get, AttributesOf(owner))


def bases_of(kind: type) -> Lookup:
    """A class and its bases in the order in which they are asked."""
    return Lookup(lambda *_: kind.__mro__, kind)


def in_cell(cell: CellType) -> Lookup:
    """The variable of a closure."""

    def get(_name: str, default: Any) -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            # The variable is not set yet.
            return default

    return Lookup(get, cell)


def contents_of(cell: CellType) -> Any:
    """The value of a variable of a closure; ``None`` where it is not set yet."""
    return in_cell(cell).get("", None)


def in_context(variable: ContextVar[Any]) -> Lookup:
    """The value of a variable of the context."""
    return Lookup(lambda _, default: variable.get(default))


def is_alive(reference: weakref.ref[Any]) -> Lookup:
    """Whether a weak reference leads to an object, which is not held."""
    return Lookup(lambda *_: reference() is not None)


def keys_of(table: dict[Any, Any]) -> Lookup:
    """The keys of a dict in their order."""
    return Lookup(lambda *_: tuple(table), table)


def of_tensor(table: Table, tensor: str) -> Lookup:
    """Attributes that Python is told of a tensor; the tensor is in a table by name, and may be replaced."""
    return Lookup(lambda name, default: told_of(table.get(tensor, None), name, default))


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
