# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The Python values that a trace went by: numbers, flags and texts in attributes, configurations, globals, closures.

A value counts where code that ran names it: of the attributes of the model's modules, and of objects that are
attributes of these, those whose names stand in the code of a function that was called. That may be more than what was
read. It is less of names that are put together while the model runs (``getattr(self, f"scale_{i}")``), of methods that
are replaced on a class, and of what objects hold that are of neither a user's class nor a namespace.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from retrograd.frontend.doors.unregistered_objects import PLAIN
from retrograd.frontend.python.python_calls_seen import PythonSeen, is_generator, is_library
from retrograd.frontend.python.python_functions import (
    cells_of,
    find_functions,
    global_names,
    is_programs,
    is_users_class,
    names_in,
)
from retrograd.frontend.python.python_places import (
    ABSENT,
    Cell,
    Environment,
    Items,
    OfClass,
    Place,
    PythonValues,
    Settings,
    Slots,
)
from retrograd.frontend.python.source_locations import is_user_file

# What every module has: its mode, which calls look at by themselves, and tables.
_OF_ALL_MODULES = frozenset(vars(torch.nn.Module()))
# Of the class's, another may be put on a module.
_METHOD = "forward"
_DEPTH = 4
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
# Of Python's own classes, those whose objects are a user's settings.
_NAMESPACES = (SimpleNamespace, argparse.Namespace)
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)
_VALUES = (*PLAIN, *_FUNCTIONS, np.generic)
# Arrays of more bytes are not copied, and known by being the same object.
_COMPARED = 2**24
# What a user may set between two calls; those that are always looked at, and those that are where code names them.
_ALWAYS = {
    "get_default_dtype": torch.get_default_dtype,
    "are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled,
}
_NAMED = {
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "get_num_threads": torch.get_num_threads,
}
_ASKING = frozenset(("hasattr", "getattr"))


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
    search.add_settings()
    for name, value in seen.environment.items():
        known = ABSENT if value is None else value
        search.places.append(Place(f"os.environ[{name!r}]", Environment(os.environ), name, known))
    return PythonValues(tuple(search.places), tuple(search.tensors))


def find_generators(model: Callable[..., Any], modules: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """Generators of random numbers that a model can see: in attributes of its modules, globals and closures."""
    found: dict[int, tuple[str, Any]] = {}
    for path, module in modules.items():
        for name, value in vars(module).items():
            if is_generator(value):
                found.setdefault(id(value), (f"{path}.{name}".lstrip("."), value))
    for function in find_functions(model, modules.values(), None):
        for name, value in cells_of(function).items():
            if is_generator(value):
                found.setdefault(id(value), (name, value))
        for name in global_names(function.__code__):
            if is_generator(value := function.__globals__.get(name)):
                found.setdefault(id(value), (name, value))
    return dict(found.values())


class _Search:
    """Looks for values by the names in the code of what ran."""

    def __init__(self, codes: set[CodeType], changed: set[tuple[int, str]]) -> None:
        self.names = frozenset(name for code in codes for name in names_in(code)) | _layer_names()
        self.asked = frozenset(
            name
            for code in codes
            if is_programs(code) and not _ASKING.isdisjoint(code.co_names)
            for name in code.co_consts
            if isinstance(name, str) and name.isidentifier()
        )
        self.changed = changed
        self.places: list[Place] = []
        # Those of tensors, which the program may have a copy of.
        self.tensors: list[Place] = []
        self._seen: set[int] = set()
        # Of tables that are made here, so that no two have one identity.
        self._tables: list[Any] = []

    def add_settings(self) -> None:
        """Add settings of PyTorch's."""
        settings = _ALWAYS | {name: get for name, get in _NAMED.items() if name in self.names}
        table = Settings(settings)
        self.places += [Place(f"torch.{name}()", table, name, get()) for name, get in settings.items()]

    def add_attributes(self, path: str, owner: Any, depth: int) -> None:
        """Values in the attributes of an object, and of objects in these."""
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        table = getattr(owner, "__dict__", {})
        is_module = isinstance(owner, torch.nn.Module)
        hidden = _OF_ALL_MODULES if is_module else frozenset()
        for name in self.names.intersection(table) - hidden:
            if (id(owner), name) not in self.changed:
                self._add(f"{path}.{name}", table, name, depth)
        for name in self.names.intersection(_slots_of(type(owner))):
            self._add(f"{path}.{name}", Slots(owner), name, depth)
        inherited: set[str] = set()
        for kind in type(owner).__mro__:
            if is_users_class(kind):
                inherited |= self.names.intersection(vars(kind)) - table.keys()
        if is_module:
            self._add(f"{path}.{_METHOD}", table, _METHOD, 0)
        for name in inherited:
            if isinstance(OfClass(type(owner)).get(name), (*PLAIN, np.generic, np.ndarray)):
                self._add_inherited(path, table, name, owner)
        for name in self.asked - table.keys() - inherited:
            if not hasattr(type(owner), name) and (id(owner), name) not in self.changed:
                self.places.append(Place(f"{path}.{name}", table, name, ABSENT))

    def _add_inherited(self, path: str, table: Any, name: str, owner: Any) -> None:
        """The class's own value, for as long as the object has none."""
        if (id(owner), name) not in self.changed:
            self.places.append(Place(f"{path}.{name}", table, name, ABSENT))
            kind = type(owner)
            if (key := hash((id(kind), name))) not in self._seen:
                self._seen.add(key)
                self._add(f"{kind.__qualname__}.{name}", OfClass(kind), name, 0)

    def add_names(self, function: FunctionType) -> None:
        """Values that a function finds in its globals and closure."""
        module = function.__globals__.get("__name__", "")
        of_program = is_programs(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add(name, Cell(cell), name, _DEPTH)
        for name in global_names(function.__code__):
            value = function.__globals__.get(name, ABSENT)
            if isinstance(value, ModuleType):
                self._add_names_of_module(value, function)
            elif value is not ABSENT and not (
                isinstance(value, type) or (isinstance(value, _FUNCTIONS) and not of_program)
            ):
                self._add(f"{module}.{name}", function.__globals__, name, _DEPTH)

    def _add_names_of_module(self, module: ModuleType, function: FunctionType) -> None:
        file = getattr(module, "__file__", None) or ""
        if file and is_user_file(file) and not is_library(file) and not is_numpy(module):
            self._add_module(module)
        elif is_programs(function.__code__):
            # Functions of a library that a user may put others in the place of.
            for name in set(names_in(function.__code__)).intersection(vars(module)):
                if isinstance(vars(module)[name], FunctionType | BuiltinFunctionType):
                    self._add(f"{module.__name__}.{name}", vars(module), name, 0)

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
        self._tables.append(table)
        value = table.get(name, ABSENT)
        if value is ABSENT or isinstance(value, _VALUES):
            self.places.append(Place(path, table, name, value))
        elif isinstance(value, torch.Tensor):
            self._add_tensor(path, table, name, value)
        elif isinstance(value, np.ndarray):
            self.places.append(Place(path, table, name, value.copy() if value.nbytes <= _COMPARED else value))
        elif isinstance(value, _CONTAINERS):
            leaves = pytree.tree_leaves(value, is_leaf=lambda leaf: isinstance(leaf, PLAIN))
            if all(isinstance(leaf, (*_VALUES, np.ndarray, set, frozenset)) for leaf in leaves) and _is_plain_tree(
                value
            ):
                self.places.append(Place(path, table, name, copy.deepcopy(value)))
                return
            self._add_tensors_in(path, value)
            if depth:
                for leaf in leaves:
                    self._add_object(path, leaf, depth - 1)
        elif depth and _is_object(value):
            # Another object in its place has attributes of its own.
            self.places.append(Place(path, table, name, value))
            self._add_object(path, value, depth - 1)

    def _add_tensors_in(self, path: str, container: Any) -> None:
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            if isinstance(value, torch.Tensor) and isinstance(container, dict | list):
                self._add_tensor(f"{path}[{key!r}]", Items(container), key, value)
            elif isinstance(value, dict | list | tuple):
                self._add_tensors_in(f"{path}[{key!r}]", value)

    def _add_tensor(self, path: str, table: Any, name: Any, value: torch.Tensor) -> None:
        self.tensors.append(Place(path, table, name, weakref.ref(value)))

    def _add_object(self, path: str, value: Any, depth: int) -> None:
        if _is_object(value):
            self.add_attributes(path, value, depth)


def _slots_of(kind: type) -> set[str]:
    """The names of attributes for which objects of a class have a place that is in no dict."""
    return {
        name for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, MemberDescriptorType)
    }


def _is_object(value: Any) -> bool:
    """Whether a value is an object of a user's class, or of one that holds a user's settings."""
    ours = (torch.Tensor, torch.nn.Module, type, ModuleType, *_FUNCTIONS)
    is_users = is_users_class(type(value)) or isinstance(value, _NAMESPACES)
    return is_users and not isinstance(value, ours) and not is_generator(value)


def _is_plain_tree(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain_tree(part) for part in value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return all(_is_plain_tree(part) for part in value)
    if isinstance(value, np.ndarray):
        return value.nbytes <= _COMPARED
    return isinstance(value, _VALUES)


def is_numpy(module: ModuleType) -> bool:
    """Whether a module is one of numpy's."""
    return module.__name__.partition(".")[0] == "numpy"


@functools.cache
def _layer_names() -> frozenset[str]:
    """Collect the names that torch's own layers use in their forwards, whose code is not looked at one by one."""
    layers = (value for value in vars(torch.nn).values() if isinstance(value, type))
    functions = (v for layer in layers for v in vars(layer).values() if isinstance(v, FunctionType))
    return frozenset(
        name
        for f in functions
        if f.__name__ not in ("__init__", "extra_repr", "__repr__")
        for name in names_in(f.__code__)
    )
