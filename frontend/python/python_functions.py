# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Functions of the user's that a model runs, and the names in their code."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from retrograd.frontend.python.python_places import ABSENT, Cell


def find_functions(model: Callable[..., Any], modules: Any, codes: set[CodeType] | None) -> Iterator[FunctionType]:
    """Functions of the user's that ``codes`` are of, from the model and its modules' classes on, through what these
    name; without ``codes``, those that are not called through others."""
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    pending: list[Any] = [model, *(v for kind in kinds if is_users_class(kind) for v in vars(kind).values())]
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
            pending += cells_of(function).values()
            pending += [function.__globals__.get(name) for name in global_names(function.__code__)]


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


def is_programs(function: Any) -> bool:
    """Whether a function is of the user's program, and of no library that he installed."""
    return "site-packages" not in function.__code__.co_filename
