# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions of the user's that a model runs, and the names in their code."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from retrograd.frontend.python.python_places import ABSENT, Cell

# Of a container as many elements are looked at: what is longer is data.
_LONGEST = 256


def find_functions(model: Callable[..., Any], modules: Any, codes: set[CodeType] | None) -> Iterator[FunctionType]:
    """Functions of the user's that ``codes`` are of, from the model, its modules' classes and what these hold on,
    through what functions name, containers and objects; without ``codes``, those that are not called through others."""
    modules = list(modules)
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    pending: list[Any] = [model, *(v for kind in kinds if is_users_class(kind) for v in vars(kind).values())]
    if codes is not None:
        pending += [value for module in modules for value in vars(module).values()]
    # By identity: of one code there may be several functions, each with a closure of its own.
    known: set[int] = set()
    looked_at: set[int] = set()
    while pending:
        value = pending.pop()
        if codes is not None and id(value) not in looked_at:
            looked_at.add(id(value))
            pending += _held_by(value)
        function = _plain_function(value)
        if function is None or id(function) in known or (codes is not None and function.__code__ not in codes):
            continue
        known.add(id(function))
        yield function
        if codes is not None:
            pending += [*cells_of(function).values(), *(function.__defaults__ or ())]
            pending += (function.__kwdefaults__ or {}).values()
            pending += [function.__globals__.get(name) for name in global_names(function.__code__)]


def _held_by(value: Any) -> Iterable[Any]:
    """Whatever may be a function, or hold one, in a container, an object of a class of the user's, or what has one or
    some arguments already."""
    if isinstance(value, dict):
        return list(value.values())[:_LONGEST]
    if isinstance(value, list | tuple):
        return value[:_LONGEST]
    if isinstance(value, functools.partial):
        return [*value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    kind = type(value)
    if isinstance(value, torch.Tensor | torch.nn.Module | type | ModuleType) or not is_users_class(kind):
        return ()
    methods = [v for base in kind.__mro__ if is_users_class(base) for v in vars(base).values()]
    return [*getattr(value, "__dict__", {}).values(), *methods]


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


def cells_of(function: FunctionType) -> dict[str, Any]:
    """Contents of a function's closure, by name."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: value for name, cell in pairs if (value := Cell(cell).get(name, ABSENT)) is not ABSENT}


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names in code, in functions within it too, and texts in it, which may be names."""
    yield from (name for name in code.co_names if not name.startswith("__"))
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, CodeType):
            yield from names_in(constant)


@functools.cache
def global_names(code: CodeType) -> tuple[str, ...]:
    """The globals that code reads, in functions within it too: of ``model.step``, ``model`` and not ``step``."""
    read = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in global_names(part)]
    return tuple(dict.fromkeys((*read, *inner)))


def is_users_class(kind: type) -> bool:
    """Whether a class is of neither Python, PyTorch nor NumPy."""
    module = kind.__module__.partition(".")[0]
    return module not in ("torch", "retrograd", "numpy", "builtins") and module not in sys.stdlib_module_names


def is_programs(code: CodeType) -> bool:
    """Whether code is of the user's program, and of no library that he installed."""
    return "site-packages" not in code.co_filename
