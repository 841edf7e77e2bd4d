# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Hooks that a model registers on its modules itself, the first time it runs, as libraries do to collect what layers
give.

The trace of a model takes back what the model does to its modules. Called in eager later, the model registers the same
hooks once more, and what was traced has run them: it is still the same program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None))


class OwnHooks:
    """The hooks that were registered while a model was traced, by the table of a module that they were in."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[Hashable, ...]] = {}

    @property
    def has_noted(self) -> bool:
        """Whether any was registered."""
        return bool(self._noted)

    @contextlib.contextmanager
    def noting(self, model: torch.nn.Module | None) -> Iterator[None]:
        """Note the hooks that the block registers on modules of ``model``."""
        tables = [table for module in (model.modules() if model is not None else ()) for table in _tables(module)]
        before = [set(table) for table in tables]
        yield
        for table, keys in zip(tables, before, strict=True):
            added = tuple(_describe(hook) for key, hook in table.items() if key not in keys)
            if added:
                self._noted[id(table)] = added

    def find(self, table: Mapping[int, object]) -> frozenset[int]:
        """The keys of the last hooks in ``table``, if these are the ones that were noted for it."""
        noted = self._noted.get(id(table), ())
        last = list(table.items())[-len(noted) :] if noted else []
        return frozenset(key for key, _ in last) if tuple(_describe(hook) for _, hook in last) == noted else frozenset()


def _tables(module: torch.nn.Module) -> tuple[Mapping[int, object], ...]:
    return module._forward_pre_hooks, module._forward_hooks


@dataclass(frozen=True, eq=False)
class _Tracer:
    """Stands for a tensor of the trace, which is no other tensor."""


@dataclass(frozen=True)
class _Same:
    """An object that has to be the same one; held, so that no other gets its address."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _describe(hook: Any, within: tuple[int, ...] = ()) -> Hashable:
    """Identify a hook by its behaviour, as far as that can be told of functions: its code, and the plain values and
    functions that it closes over, of which one may close over itself.

    Another object, such as a module that it closes over, has to be the same one.
    """
    if id(hook) in within:
        return within.index(id(hook))
    if not isinstance(hook, FunctionType):
        return _Tracer() if isinstance(hook, torch.Tensor) else _Same(hook)
    values = [cell.cell_contents for cell in hook.__closure__ or ()]
    outer = (*within, id(hook))
    closed = tuple((type(v), v) if isinstance(v, _PLAIN) else _describe(v, outer) for v in values)
    return hook.__code__, closed, _Same(hook.__defaults__)
