# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions of the user's that a model runs, and the names in their code."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from retrograd.frontend.python.found_lines import is_library
from retrograd.frontend.python.python_tables import ABSENT, in_cell
from retrograd.frontend.python.source_locations import is_user_file


def find_functions(model: Callable[..., Any], modules: Iterable[torch.nn.Module]) -> Iterator[FunctionType]:
    """The model's function, or those of its modules' classes, that are the user's."""
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    values = [model, *(v for kind in kinds if is_users_class(kind) for v in vars(kind).values())]
    found = (plain_function(value) for value in values)
    yield from {id(function): function for function in found if function is not None}.values()


def plain_function(value: Any) -> FunctionType | None:
    """The function behind a method, a property or a partial call; ``None`` where there is none in Python."""
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


def cells_of(function: FunctionType) -> dict[str, Any]:
    """Contents of a function's closure, by name."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: value for name, cell in pairs if (value := in_cell(cell).get(name, ABSENT)) is not ABSENT}


def names_in(code: CodeType, but_of: Collection[CodeType] = ()) -> Iterator[str]:
    """Yield the names in code, in functions within it too, and texts in it, which may be names; none ``but_of``
    these."""
    if code in but_of:
        return
    yield from code.co_names
    yield from _texts_in(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant, but_of)


def _texts_in(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        # A pattern of ``match`` has a tuple of them.
        for text in constant if isinstance(constant, tuple) else (constant,):
            if isinstance(text, str) and text.isidentifier():
                yield text


@functools.cache
def names_read(code: CodeType) -> frozenset[str]:
    """The names in code, as :func:`names_in`, but for those of attributes that it sets and does not read."""
    own = {str(i.argval) for i in dis.get_instructions(code) if i.opcode in dis.hasname and i.opname != "STORE_ATTR"}
    inner = [names_read(part) for part in code.co_consts if isinstance(part, CodeType)]
    return frozenset(own.union(_texts_in(code), *inner))


@functools.cache
def global_names(code: CodeType) -> tuple[str, ...]:
    """The globals that code reads, in functions within it too: of ``model.step``, ``model`` and not ``step``."""
    read = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in global_names(part)]
    return tuple(dict.fromkeys((*read, *inner)))


@functools.cache
def _imports(code: CodeType) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    """The level, the module and the names of each ``import`` in code."""
    found, instructions = [], list(dis.get_instructions(code))
    for number, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME":
            level, names = (instructions[number - 2].argval, instructions[number - 1].argval)
            found.append((level, instruction.argval, tuple(names or ())))
    inner = [imported for part in code.co_consts if isinstance(part, CodeType) for imported in _imports(part)]
    return (*found, *inner)


def imported_modules(code: CodeType, table: Mapping[str, Any]) -> Iterator[ModuleType]:
    """The modules that code imports when it runs; ``table`` has its globals."""
    for level, name, names in _imports(code):
        package = str(table.get("__package__") or "")
        base = package.rsplit(".", level - 1)[0] if level > 1 else package
        full = f"{base}.{name}".rstrip(".") if level else name
        parts = full.split(".")
        paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
        for path in (*paths, *(f"{full}.{part}" for part in names)):
            module = sys.modules.get(path)
            if isinstance(module, ModuleType):
                yield module


_WRITES = frozenset(("STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "STORE_DEREF", "DELETE_ATTR", "DELETE_SUBSCR"))
_WRITING = frozenset(("next", "send", "append", "appendleft", "pop", "popleft", "popitem", "add", "update", "setattr"))


@functools.cache
def may_write(code: CodeType) -> bool:
    """Whether code may leave something behind for its next run, other than in a tensor."""
    inner = any(isinstance(part, CodeType) and may_write(part) for part in code.co_consts)
    is_called = not _WRITING.isdisjoint(code.co_names)
    return inner or is_called or any(i.opname in _WRITES for i in dis.get_instructions(code))


def is_wrapper(function: FunctionType) -> bool:
    """Whether a function is one that Python's library or PyTorch puts around another."""
    file = function.__code__.co_filename
    return function.__closure__ is not None and not (is_user_file(file) and not is_library(file))


def is_users_class(kind: type) -> bool:
    """Whether a class is of neither Python, PyTorch nor NumPy."""
    module = kind.__module__.partition(".")[0]
    return module not in ("torch", "retrograd", "numpy", "builtins") and module not in sys.stdlib_module_names


def is_programs(code: CodeType) -> bool:
    """Whether code is of the user's program, and of no library that he installed."""
    return is_in_program(code.co_filename)


def is_in_program(file: str) -> bool:
    """Whether a file is of no library that the user installed."""
    return "site-packages" not in file


def is_layer(module: torch.nn.Module) -> bool:
    """Whether a module is of a class of PyTorch's, or of one made of such, whose code is not looked at."""
    kinds = (kind for kind in type(module).__mro__ if issubclass(kind, torch.nn.Module))
    return any(kind is not torch.nn.Module and not is_users_class(kind) for kind in kinds)


class Names:
    """The names in code that ran, and of a part of it: of the program's own."""

    def __init__(self, codes: Iterable[CodeType], read: Iterable[str]) -> None:
        own = [code for code in codes if is_programs(code)]
        layers = _layer_names()
        self.of_program = frozenset((*read, *(name for code in own for name in names_in(code))))
        self.all = self.of_program | layers | {name for code in codes for name in names_in(code)}
        # Code that reads attributes by no name of its own reads all of them.
        self.reads_all = any(not _READING_ALL.isdisjoint(code.co_names) for code in own)
        self.asked = frozenset(read) | {
            name
            for code in own
            if not _ASKING.isdisjoint(code.co_names)
            for name in code.co_consts
            if isinstance(name, str) and name.isidentifier()
        }

    def within(self, table: Iterable[str]) -> set[str]:
        """The names in a table that count."""
        return set(table) if self.reads_all else set(self.all.intersection(table))


_ASKING = frozenset(("hasattr", "getattr"))
_READING_GLOBALS = frozenset(("globals", "eval", "exec"))
_READING_ALL = frozenset(("vars", "__dict__", "eval", "exec", "attrgetter", "dir", "getmembers"))


def reads_globals(code: CodeType) -> bool:
    """Whether code of the program's reads globals by other names than its own."""
    return is_programs(code) and not _READING_GLOBALS.isdisjoint(code.co_names)


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
