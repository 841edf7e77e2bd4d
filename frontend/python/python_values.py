# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The Python values that a trace went by: numbers, flags and texts in attributes, configurations, globals, closures.

A value counts where code that ran names it: of the attributes of the model's modules, and of objects that are
attributes of these, those whose names stand in the code of a function that was called. That may be more than what was
read, and never less, but for names that are put together while the model runs (``getattr(self, f"scale_{i}")``).
"""

from __future__ import annotations

import copy
import dis
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from retrograd.frontend.doors.unregistered_objects import PLAIN
from retrograd.frontend.python.python_calls_seen import PythonSeen, is_generator, is_library
from retrograd.frontend.python.python_places import ABSENT, Environment, Place, PythonValues
from retrograd.frontend.python.source_locations import is_user_file

# What every module has: its mode, which calls look at by themselves, and tables.
_OF_ALL_MODULES = frozenset(vars(torch.nn.Module()))
_DEPTH = 4
_CONTAINERS = (dict, list, tuple, set, frozenset)


def find_values(
    model: Callable[..., Any], modules: Mapping[str, torch.nn.Module], seen: PythonSeen, changed: set[tuple[int, str]]
) -> PythonValues:
    """The values that ``model``, of these modules by path, went by when it ran what ``seen`` has.

    ``changed`` are attributes, by the identity of their module, that the model itself sets when it is called: what was
    in them is not looked at.
    """
    search = _Search(seen.codes, changed)
    for path, module in modules.items():
        search.add_attributes(f"{path or 'model'}", module, _DEPTH)
    for function in find_functions(model, modules.values(), seen.codes):
        search.add_names(function)
    for name, value in seen.environment.items():
        known = ABSENT if value is None else value
        search.places.append(Place(f"os.environ[{name!r}]", Environment(os.environ), name, known))
    return PythonValues(tuple(search.places))


def find_generators(model: Callable[..., Any], modules: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """Generators of random numbers that a model can see: in attributes of its modules, globals and closures."""
    found: dict[int, tuple[str, Any]] = {}
    for path, module in modules.items():
        for name, value in vars(module).items():
            if is_generator(value):
                found.setdefault(id(value), (f"{path}.{name}".lstrip("."), value))
    for function in find_functions(model, modules.values(), None):
        for name, value in _cells(function).items():
            if is_generator(value):
                found.setdefault(id(value), (name, value))
        for name in _global_names(function.__code__):
            if is_generator(value := function.__globals__.get(name)):
                found.setdefault(id(value), (name, value))
    return dict(found.values())


def find_functions(model: Callable[..., Any], modules: Any, codes: set[CodeType] | None) -> Iterator[FunctionType]:
    """Functions of the user's that ``codes`` are of, from the model and its modules' classes on, through what these
    name; without ``codes``, those that are not called through others."""
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    pending: list[Any] = [model, *(v for kind in kinds if _is_users_class(kind) for v in vars(kind).values())]
    known: set[CodeType] = set()
    while pending:
        function = _plain_function(pending.pop())
        if function is None or function.__code__ in known:
            continue
        if codes is not None and function.__code__ not in codes:
            continue
        known.add(function.__code__)
        yield function
        if codes is not None:
            pending += _cells(function).values()
            pending += [function.__globals__.get(name) for name in _global_names(function.__code__)]


def _plain_function(value: Any) -> FunctionType | None:
    while True:
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, staticmethod | classmethod | MethodType):
            value = value.__func__
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, FunctionType):
            # What stands behind a decorator is in the closure of what it gives.
            return value
        else:
            return None


def _cells(function: FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: value for name, cell in cells if (value := _content(cell)) is not ABSENT}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # The variable is not set yet.
        return ABSENT


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in code, in functions within it too, and texts in it, which may be names."""
    yield from (name for name in code.co_names if not name.startswith("__"))
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names(constant)


@functools.cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    """The globals that code reads, in functions within it too: of ``model.step``, ``model`` and not ``step``."""
    read = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in _global_names(part)]
    return tuple(dict.fromkeys((*read, *inner)))


def _is_users_class(kind: type) -> bool:
    module = kind.__module__.partition(".")[0]
    return module not in ("torch", "retrograd", "numpy", "builtins") and module not in sys.stdlib_module_names


class _Search:
    """Looks for values by the names in the code of what ran."""

    def __init__(self, codes: set[CodeType], changed: set[tuple[int, str]]) -> None:
        self.names = frozenset(name for code in codes for name in _names(code)) | _layer_names()
        self.changed = changed
        self.places: list[Place] = []
        self._seen: set[int] = set()

    def add_attributes(self, path: str, owner: Any, depth: int) -> None:
        """Values in the attributes of an object, and of objects in these."""
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        table = getattr(owner, "__dict__", {})
        hidden = _OF_ALL_MODULES if isinstance(owner, torch.nn.Module) else frozenset()
        for name in self.names.intersection(table) - hidden:
            if (id(owner), name) not in self.changed:
                self._add(f"{path}.{name}", table, name, depth)
        for kind in type(owner).__mro__:
            if not _is_users_class(kind):
                continue
            for name in self.names.intersection(vars(kind)) - table.keys():
                if isinstance(vars(kind)[name], PLAIN) and (id(owner), name) not in self.changed:
                    # The class's own, for as long as the object has none.
                    self.places.append(Place(f"{path}.{name}", table, name, ABSENT))
                    self._add(f"{kind.__qualname__}.{name}", vars(kind), name, 0)

    def add_names(self, function: FunctionType) -> None:
        """Values that a function finds in its globals and closure."""
        module = function.__globals__.get("__name__", "")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if _content(cell) is not ABSENT:
                self._add(name, _Cell(cell), name, _DEPTH)
        for name in _global_names(function.__code__):
            value = function.__globals__.get(name, ABSENT)
            if isinstance(value, ModuleType):
                file = getattr(value, "__file__", None) or ""
                if file and is_user_file(file) and not is_library(file) and not is_numpy(value):
                    self._add_module(value)
            elif value is not ABSENT and not isinstance(value, type):
                self._add(f"{module}.{name}", function.__globals__, name, _DEPTH)

    def _add_module(self, module: ModuleType) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        for name in self.names.intersection(vars(module)):
            self._add(f"{module.__name__}.{name}", vars(module), name, 1)

    def _add(self, path: str, table: Any, name: str, depth: int) -> None:
        key = hash((id(table), name))
        if key in self._seen:
            return
        self._seen.add(key)
        value = table.get(name)
        if isinstance(value, PLAIN):
            self.places.append(Place(path, table, name, value))
        elif isinstance(value, _CONTAINERS):
            leaves = pytree.tree_leaves(value, is_leaf=lambda leaf: isinstance(leaf, PLAIN))
            if all(isinstance(leaf, (*PLAIN, set, frozenset)) for leaf in leaves) and _is_plain_tree(value):
                self.places.append(Place(path, table, name, copy.deepcopy(value)))
            elif depth:
                for leaf in leaves:
                    self._add_object(path, leaf, depth - 1)
        elif depth:
            self._add_object(path, value, depth - 1)

    def _add_object(self, path: str, value: Any, depth: int) -> None:
        ours = (torch.Tensor, torch.nn.Module, type, ModuleType, FunctionType, MethodType)
        if not isinstance(value, ours) and _is_users_class(type(value)) and not is_generator(value):
            self.add_attributes(path, value, depth)


def _is_plain_tree(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain_tree(part) for part in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain_tree(part) for part in value)
    return isinstance(value, PLAIN)


def is_numpy(module: ModuleType) -> bool:
    """Whether a module is one of numpy's."""
    return module.__name__.partition(".")[0] == "numpy"


class _Cell:
    """The variable of a closure, as a table of one name."""

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def get(self, _name: str, default: Any = None) -> Any:
        value = _content(self._cell)
        return default if value is ABSENT else value


@functools.cache
def _layer_names() -> frozenset[str]:
    """Collect the names that torch's own layers use in their forwards, whose code is not looked at one by one."""
    layers = (value for value in vars(torch.nn).values() if isinstance(value, type))
    functions = (v for layer in layers for v in vars(layer).values() if isinstance(v, FunctionType))
    return frozenset(
        name
        for f in functions
        if f.__name__ not in ("__init__", "extra_repr", "__repr__")
        for name in _names(f.__code__)
    )
