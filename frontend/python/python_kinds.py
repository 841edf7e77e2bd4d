# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Says what kind of thing a Python value is to a search for values."""

from __future__ import annotations

import argparse
import functools
import sys
import threading
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from retrograd.frontend.python.found_lines import is_library
from retrograd.frontend.python.generators import is_generator
from retrograd.frontend.python.python_contents import CONTAINERS, changes_within, items_of
from retrograd.frontend.python.python_functions import is_in_program, is_users_class
from retrograd.frontend.python.source_locations import is_user_file

# Of a library's own values as many are compared one by one.
_MOST = 16
# Of Python's own classes, those whose objects are a user's settings.
_NAMESPACES = (SimpleNamespace, argparse.Namespace)
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)
CACHED = functools._lru_cache_wrapper
# Around a function, in a class.
AROUND = (property, staticmethod, classmethod, functools.cached_property, CACHED)


def functions_in(value: Any) -> Iterator[Any] | None:
    """Give what may be functions, of a value that calls others; ``None`` of one that does not."""
    if isinstance(value, property):
        return iter((value.fget,))
    if isinstance(value, staticmethod | classmethod):
        return iter((value.__func__,))
    if isinstance(value, functools.cached_property):
        return iter((value.func,))
    if isinstance(value, MethodType):
        return iter((value.__func__, value.__self__))
    if isinstance(value, functools.partial):
        return iter((value.func, *value.args, *value.keywords.values()))
    return iter((value.__wrapped__,)) if isinstance(value, CACHED) else None


def texts_in(parts: Any) -> Iterator[str]:
    """Yield the texts in tuples."""
    if isinstance(parts, str):
        yield parts
    elif isinstance(parts, tuple):
        for part in parts:
            yield from texts_in(part)


def is_object(value: Any) -> bool:
    """Whether a value is an object of a user's class, or of one that holds a user's settings."""
    ours = (torch.Tensor, torch.nn.Module, type, ModuleType, *_FUNCTIONS)
    is_users = is_users_class(type(value)) or isinstance(value, (*_NAMESPACES, threading.local))
    return is_users and not isinstance(value, ours) and not is_generator(value)


def is_library_class(kind: type) -> bool:
    """Whether a class is one of Python's own, NumPy's or ours, which no one writes to."""
    return not (is_users_class(kind) or kind.__module__.partition(".")[0] == "torch")


@functools.cache
def is_programs_class(kind: type) -> bool:
    """Whether a class is of the user's program, and of no library that he installed."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return is_users_class(kind) and is_in_program(file)


def is_long(value: Any) -> bool:
    """Whether a value of a library's holds so many others that it is no setting, other than in a dict, of which a
    write shows."""
    return changes_within(value) and _count(value) > _MOST


def _count(value: Any, depth: int = 3) -> int:
    items = items_of(value).values() if isinstance(value, CONTAINERS) and depth else ()
    return len(items) + sum(_count(part, depth - 1) for part in items)


def is_numpy(module: ModuleType) -> bool:
    """Whether a module is one of numpy's."""
    return module.__name__.partition(".")[0] == "numpy"


def is_users_module(module: ModuleType) -> bool:
    """Whether a module is none of Python's, PyTorch's or ours."""
    file = getattr(module, "__file__", None) or ""
    return bool(file) and is_user_file(file) and not is_library(file)
