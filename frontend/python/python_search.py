# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Looks for the Python values that a model goes by, from one object to those that it holds."""

from __future__ import annotations

import builtins
import operator
import weakref
from collections.abc import Iterable
from contextvars import ContextVar
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.backends import PropModule

from retrograd.frontend.doors.unregistered_objects import PLAIN
from retrograd.frontend.python.found_lines import is_library
from retrograd.frontend.python.generators import is_generator
from retrograd.frontend.python.python_contents import (
    CONTAINERS,
    as_it_was,
    changes_within,
    dicts_within,
    items_of,
    slots_of,
)
from retrograd.frontend.python.python_functions import (
    Names,
    global_names,
    imported_modules,
    is_in_program,
    is_programs,
    is_users_class,
    is_wrapper,
    names_in,
    reads_globals,
)
from retrograd.frontend.python.python_kinds import (
    AROUND,
    CACHED,
    functions_in,
    is_library_class,
    is_long,
    is_numpy,
    is_object,
    is_programs_class,
    is_users_module,
    texts_in,
)
from retrograd.frontend.python.python_places import Place
from retrograd.frontend.python.python_tables import (
    ABSENT,
    OfClass,
    Table,
    attributes_of,
    bases_of,
    class_of,
    contents_of,
    dict_of,
    in_cell,
    in_context,
    is_alive,
    keeps_address,
    keys_of,
    parts_of,
    sources_of,
    torchs_own,
    within,
)
from retrograd.frontend.python.source_locations import is_user_file

_TABLES = ("_parameters", "_buffers")
# How many objects, one in the other, are looked into, and how many of a container: what is longer is data.
_DEPTH, _LONGEST = 10, 256
# Settings of PyTorch's that a trace changes.
_SET_WHILE_TRACING = frozenset(("torch.backends.mkldnn.enabled",))
# How a module is called, and asked for what it has by name.
_CALLED = frozenset(("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "forward"))


class Search:
    """Looks for values by the names in the code of what ran, ``codes``. ``changed`` are attributes that the model sets
    when it is called; ``registered`` are its modules.

    Names are looked for in alphabetical order: what is found by several has its path from the first, and is looked into
    no deeper from there. In the order of sets, of which no two need have the same, two searches of one model would
    have different paths.
    """

    def __init__(
        self, names: Names, codes: set[CodeType], changed: set[tuple[int, str]], registered: Iterable[torch.nn.Module]
    ) -> None:
        self.names = names
        self.codes = codes
        # Code that did not run in the forward, and does in the backward, or ran before.
        self.more_codes: set[CodeType] = set()
        # Names of attributes that are in none of it.
        self.more_names: set[str] = set()
        self.generators: dict[str, Any] = {}
        # What a trace has one value of, whatever it is where the program is called.
        self.eager: list[Place] = []
        self.places: list[Place] = []
        # Those of tensors, which the program may have a copy of.
        self.tensors: list[Place] = []
        self.steps = False
        self._changed = changed
        self._registered = {id(module) for module in registered}
        self._seen: set[Any] = set()
        self._own_names: dict[type, set[str]] = {}
        self._names_of_classes: dict[type, frozenset[str]] = {}
        # What is made here, so that no two have one identity.
        self._kept: list[Any] = []

    def _is_new(self, kind: str, value: Any) -> bool:
        key = (kind, id(value))
        if key in self._seen:
            return False
        self._seen.add(key)
        self._kept.append(value)
        return True

    def add(self, path: str, table: Table, name: str, depth: int = _DEPTH) -> None:
        """Add the value at a place, and look into it."""
        key = ("place", id(table), name)
        if key in self._seen:
            return
        self._seen.add(key)
        self._kept.append(table)
        value = table.get(name, ABSENT)
        if isinstance(value, torch.Tensor):
            self._add_tensor(path, table, name, value)
        elif isinstance(value, CONTAINERS):
            self._add_tensors_in(path, table, name, (), value)
        known, dicts = as_it_was(value), tuple(dicts_within(value))
        shows = not changes_within(value) and keeps_address(table, value, known, dicts)
        self.places.append(Place(path, table, name, known, (*sources_of(table), *dicts) if shows else ()))
        self.look_into(path, value, depth)

    def look_into(self, path: str, value: Any, depth: int = _DEPTH, runs: bool = False) -> None:
        """Add what a value holds; a function that ``runs`` does so where its code is none of what ran."""
        if isinstance(value, (*PLAIN, torch.Tensor, np.ndarray)) and not isinstance(value, type):
            return
        if isinstance(value, FunctionType):
            self._add_function(value, depth, runs)
        elif (held := functions_in(value)) is not None:
            for part in held:
                self.look_into(path, part, depth, runs or isinstance(value, CACHED))
        elif isinstance(value, type):
            if is_programs_class(value) or any(self._has_run(part) for part in vars(value).values()):
                self.add_class(value, depth)
        elif is_generator(value):
            self.generators.setdefault(path, value)
        elif depth <= 0 or isinstance(value, ModuleType):
            return
        elif isinstance(value, CONTAINERS):
            for key, part in list(items_of(value).items())[:_LONGEST]:
                self.look_into(f"{path}[{key!r}]", part, depth - 1)
            if is_users_class(type(value)):
                self.add_attributes(path, value, depth - 1)
        elif isinstance(value, ContextVar):
            if self._is_new("variable", value):
                self.add(f"{path}.get()", in_context(value), "", depth - 1)
        elif isinstance(value, weakref.ref):
            self._add_weakly(path, value, depth - 1)
        elif isinstance(value, operator.attrgetter | operator.methodcaller):
            self.more_names |= {part for text in texts_in(value.__reduce__()) for part in text.split(".")}
        elif isinstance(value, torch.nn.Module):
            if id(value) not in self._registered:
                self._add_other_module(path, value, depth - 1)
        elif is_object(value):
            self.add_attributes(path, value, depth - 1)
        elif hasattr(value, "__next__"):
            self.steps = True

    def _add_weakly(self, path: str, reference: weakref.ref[Any], depth: int) -> None:
        """Add what a weak reference leads to, which the search must not keep alive."""
        self.places.append(_place(f"{path} is alive", is_alive(reference), ""))
        table = getattr(reference(), "__dict__", {})
        for name in sorted(self.names.within(table) - torchs_own(reference())):
            self.add(f"{path}().{name}", table, name, depth)

    def add_attributes(self, path: str, owner: Any, depth: int = _DEPTH) -> None:
        """Add values in the attributes of an object, and what its class has."""
        if not self._is_new("attributes", owner):
            return
        kind = type(owner)
        self.places.append(_place(f"{path}.__class__", class_of(owner), "__class__"))
        table = getattr(owner, "__dict__", {})
        if isinstance(table, dict) and getattr(owner, "__dict__", None) is table:
            self.places.append(_place(f"{path}.__dict__", dict_of(owner), ""))
        names = self.names.within(table)
        names -= torchs_own(owner)
        for name in sorted(names):
            if (id(owner), name) not in self._changed:
                self.add(f"{path}.{name}", table, name, depth)
        if self.names.reads_all and isinstance(table, dict):
            self.places.append(_place(f"{path}.__dict__", keys_of(table), ""))
        slots = attributes_of(owner)
        for name in sorted(self.names.within(slots_of(kind))):
            self.add(f"{path}.{name}", slots, name, depth)
        of_class = self.add_class(kind, depth)
        # For as long as the object has none of its own.
        absent = (self.names.asked | of_class) - table.keys()
        for name in sorted(absent) if isinstance(table, dict) else ():
            if (id(owner), name) not in self._changed and (name in of_class or not hasattr(kind, name)):
                self.places.append(Place(f"{path}.{name}", table, name, ABSENT, (table,)))

    def add_class(self, kind: type, depth: int = _DEPTH) -> frozenset[str]:
        """Add what a class has, and its bases; returns the names that count."""
        if kind in self._names_of_classes:
            return self._names_of_classes[kind]
        kinds = [base for base in kind.__mro__ if not is_library_class(base)]
        known: dict[str, type] = {}
        for base in kinds:
            for name in self._names_of(base):
                known.setdefault(name, base)
        names = self._names_of_classes[kind] = frozenset(known)
        is_own = is_programs_class(kind)
        if is_own:
            self.places.append(_place(f"{kind.__qualname__}.__mro__", bases_of(kind), "__mro__"))
        # The backward of a function runs later than what was looked at.
        runs = issubclass(kind, torch.autograd.Function)
        for number, base in enumerate(kinds):
            own, hidden = self._names_of(base), set[str]()
            # What is found behind it, or nowhere, may be put there.
            if is_programs_class(base):
                hidden = {name for name in names | self.names.asked if known.get(name) not in kinds[:number]} - own
            elif base is torch.Tensor:
                hidden = set(names - own)
            self._add_own_of_class(base, own | hidden, depth, runs)
        if is_own and type(kind) is not type and is_users_class(type(kind)):
            self.add_class(type(kind), depth)
        return names

    def _names_of(self, base: type) -> set[str]:
        """The names that count of those that a class has itself: those in code, and of functions that ran, as those
        behind operators do."""
        if base not in self._own_names:
            table, named = vars(base), self.names.within(vars(base))
            others = {n for n, v in table.items() if n not in named and self._has_run(v)}
            called = _CALLED.intersection(table) if base is torch.nn.Module else set()
            self._own_names[base] = named | others | called
        return self._own_names[base]

    def _has_run(self, value: Any, depth: int = 3) -> bool:
        """Whether a value is a function that ran, or one around such a one."""
        if isinstance(value, FunctionType):
            is_around = depth > 0 and value.__code__ not in self.codes and is_wrapper(value)
            closed = [contents_of(cell) for cell in value.__closure__ or ()] if is_around else []
            closed += [part for table in closed if isinstance(table, dict) for part in list(table.values())[:_LONGEST]]
            return value.__code__ in self.codes or any(self._has_run(part, depth - 1) for part in closed)
        held = functions_in(value) if isinstance(value, AROUND) else None
        return held is not None and depth > 0 and any(self._has_run(part, depth - 1) for part in held)

    def _add_own_of_class(self, base: type, names: set[str], depth: int, runs: bool) -> None:
        table, is_users = OfClass(base), is_users_class(base)
        self._kept.append(table)
        for name in sorted(names):
            key = ("of class", id(base), name)
            if key in self._seen:
                continue
            self._seen.add(key)
            path = f"{base.__module__}.{base.__qualname__}.{name}"
            value = table.get(name, ABSENT)
            if is_users and value is not ABSENT and (is_programs_class(base) or not is_long(value)):
                self.add(path, table, name, depth)
            else:
                self.places.append(Place(path, table, name, value, table.sources))
        for value in vars(base).values() if runs and is_users else ():
            if isinstance(value, (FunctionType, *AROUND)):
                self.look_into(base.__qualname__, value, depth, True)

    def _add_other_module(self, path: str, module: torch.nn.Module, depth: int) -> None:
        """Add a module that is none of the model's, as one in a list is."""
        if not self._is_new("other module", module):
            return
        self.add_attributes(path, module, depth)
        table = vars(module)
        self.places.append(_place(f"{path}.training", table, "training"))
        for name in ("_modules", *_TABLES, "_forward_hooks", "_forward_pre_hooks"):
            self.add(f"{path}.{name}", table, name, depth)

    def _add_function(self, function: FunctionType, depth: int, runs: bool) -> None:
        """Add what a function goes by that ran: its code, its defaults, its closure and the globals that it names."""
        code, path = function.__code__, f"{function.__module__}.{function.__qualname__}"
        is_own = is_programs(code)
        if runs and code not in self.codes and is_user_file(code.co_filename) and not is_library(code.co_filename):
            self.more_codes.add(code)
        if is_own and vars(function) and self._is_new("named function", function):
            for name in sorted(self.names.of_program.intersection(vars(function))):
                self.add(f"{path}.{name}", vars(function), name, depth)
        has_run = code in self.codes or runs
        if not (has_run or self._has_run(function)) or not self._is_new("function", function):
            return
        if not has_run:
            # It calls another, which is in its closure.
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
                content = contents_of(cell)
                if isinstance(content, dict) and self._is_new("cell", cell):
                    self.add(f"{path}.{name}", in_cell(cell), name, depth)
                self.look_into(path, content, depth)
            return
        parts = parts_of(function)
        for name in ("__code__", "__defaults__", "__kwdefaults__") if is_own else ():
            self.add(f"{path}.{name}", parts, name, depth)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if self._is_new("cell", cell):
                self.add(f"{path}.{name}", in_cell(cell), name, depth)
                self.look_into(name, contents_of(cell), depth, runs)
        self._add_globals(function, depth, runs)

    def _add_globals(self, function: FunctionType, depth: int, runs: bool) -> None:
        table, code = function.__globals__, function.__code__
        module, names = table.get("__name__", ""), frozenset(names_in(code))
        for name in (*global_names(code), *(table if reads_globals(code) else ())):
            value = table.get(name, ABSENT)
            if value is ABSENT:
                # One of Python's own, for as long as there is no other.
                if hasattr(builtins, name):
                    self.add(f"{module}.{name}", table, name, 0)
                continue
            if is_programs(code) or not is_long(value):
                self.add(f"{module}.{name}", table, name, depth)
            self.look_into(name, value, depth, runs)
            if isinstance(value, ModuleType):
                self.add_module(value, names, is_programs(code))
        for imported in imported_modules(code, table):
            self.add_module(imported, names, is_programs(code))

    def add_module(self, module: ModuleType, names: frozenset[str], is_own: bool) -> None:
        """Add what of a module's is named, by code of the program's where ``is_own``; of a library that may be
        functions and classes, which are patched at times."""
        table = vars(module)
        if is_numpy(module):
            return
        is_users, file = is_users_module(module), getattr(module, "__file__", None) or ""
        is_programs_own = is_users and is_in_program(file)
        for name in sorted((self.names.all if is_programs_own else names).intersection(table)):
            if ((key := ("of module", id(module), name, is_own)) in self._seen) or (*key[:3], True) in self._seen:
                continue
            self._seen.add(key)
            value, path = table[name], f"{module.__name__}.{name}"
            if isinstance(value, ModuleType):
                self.add_module(value, names, is_own)
            elif is_users and (is_programs_own or not is_long(value)):
                self.add(path, table, name)
            elif is_own and isinstance(value, (*PLAIN, *CONTAINERS)):
                self.add(path, table, name, 0)
            elif isinstance(value, FunctionType | BuiltinFunctionType | type):
                self.places.append(Place(path, table, name, value, (table,)))
        if isinstance(module, PropModule) and is_own:
            settings = attributes_of(module)
            for name in sorted(names.intersection(dir(type(module)))):
                path = f"{module.__name__}.{name}"
                if path in _SET_WHILE_TRACING:
                    self.eager.append(_place(path, settings, name))
                else:
                    self.add(path, settings, name, 0)

    def add_functions(self, module: ModuleType) -> None:
        """Add the functions of a module that code names, which PyTorch's own layers may call."""
        table = vars(module)
        for name in sorted(self.names.all.intersection(table)):
            if isinstance(table[name], FunctionType | BuiltinFunctionType):
                self.places.append(Place(f"{module.__name__}.{name}", table, name, table[name], (table,)))

    def _add_tensors_in(self, path: str, table: Table, name: str, keys: tuple[Any, ...], container: Any) -> None:
        items = {} if isinstance(container, set | frozenset) else items_of(container)
        for key, value in items.items():
            if isinstance(value, torch.Tensor):
                self._add_tensor(f"{path}[{key!r}]", within(table, name, keys), key, value)
            elif isinstance(value, CONTAINERS) and len(keys) < _DEPTH:
                self._add_tensors_in(f"{path}[{key!r}]", table, name, (*keys, key), value)

    def _add_tensor(self, path: str, table: Table, name: Any, value: torch.Tensor) -> None:
        self.tensors.append(Place(path, table, name, weakref.ref(value)))


def _place(path: str, table: Table, name: str) -> Place:
    return Place(path, table, name, table.get(name, None), sources_of(table))
