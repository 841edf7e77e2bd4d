# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The names in the code that a model ran."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import CodeType, FunctionType

import torch

from retrograd.frontend.python.python_functions import is_programs, names_in


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
        """Those of the names in a table that count."""
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
