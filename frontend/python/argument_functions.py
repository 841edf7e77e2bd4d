# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How a tensor of a trace was computed from the arguments of the call, for it to be computed again from others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class _Input:
    """Argument number ``place`` of a call."""

    place: int


@dataclass(frozen=True)
class _Result:
    """The result of step number ``place``."""

    place: int


@dataclass(frozen=True, eq=False)
class Noted:
    """Says how a tensor's contents came about, in its version number ``version``: they are ``part`` of what ``func``
    returned for arguments with these in the place of tensors."""

    version: int
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    part: int | None = None


@dataclass(frozen=True, eq=False)
class Steps:
    """Functions, each with its positional arguments, those by name, and which of its results is meant (``None`` where
    it gives one); the last one gives the value."""

    steps: tuple[tuple[Callable[..., Any], Any, Any, int | None], ...]

    def run(self, arguments: Sequence[Tensor]) -> Any:
        """The value for these tensors as arguments."""
        found: list[Any] = []

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, _Input):
                return arguments[leaf.place]
            return found[leaf.place] if isinstance(leaf, _Result) else leaf

        with torch.no_grad():
            for function, args, kwargs, part in self.steps:
                result = function(*pytree.tree_map(fill, args), **pytree.tree_map(fill, kwargs))
                found.append(result if part is None else result[part])
        return found[-1]

    @cached_property
    def arguments(self) -> frozenset[int]:
        """The numbers of the arguments that the value is computed from."""
        leaves = pytree.tree_leaves([(args, kwargs) for _, args, kwargs, _ in self.steps])
        return frozenset(leaf.place for leaf in leaves if isinstance(leaf, _Input))

    @cached_property
    def constants(self) -> tuple[Tensor, ...]:
        """Tensors beside the arguments that the value is computed from."""
        leaves = pytree.tree_leaves([(args, kwargs) for _, args, kwargs, _ in self.steps])
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


# Tensors of more numbers are no sizes or flags that a model keeps.
_MOST_KEPT = 64


def is_small(tensor: Tensor) -> bool:
    """Whether it has so few numbers that a model may keep a size or a flag in it."""
    return tensor.numel() <= _MOST_KEPT


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
# In the place of a tensor that comes from somewhere else.
_UNKNOWN = object()


class FunctionsOfArguments:
    """Remembers by what the tensors of a trace were computed. ``arguments`` are those that the model is called with."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        # The tensors are kept, so that their ids stay their own.
        self._inputs = {id(t): (t, t._version, _Input(place)) for place, t in enumerate(arguments)}
        self._noted: dict[int, tuple[Tensor, Noted]] = {}

    def note(self, result: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Remember that ``func`` gave ``result``, a tensor or several. Returns the result."""
        if func == _DATA:
            self._forget()
        parts = enumerate(result) if isinstance(result, tuple | list) else [(None, result)]
        for part, tensor in parts:
            if isinstance(tensor, Tensor) and id(tensor) not in self._noted and id(tensor) not in self._inputs:
                positional, named = pytree.tree_map(self._origin, (tuple(args), dict(kwargs)))
                self._noted[id(tensor)] = tensor, Noted(tensor._version, func, positional, named, part)
        return result

    def _forget(self) -> None:
        """Know nothing of any tensor so far: one of them has another name now by which writes are not counted."""
        self._noted.clear()
        self._inputs = {key: (tensor, -1, origin) for key, (tensor, _, origin) in self._inputs.items()}

    @contextmanager
    def noting_write(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[None]:
        """Remember that ``func``, called within, writes to its first argument. What else shares its memory is then not
        known any more."""
        positional, named = pytree.tree_map(self._origin, (tuple(args), dict(kwargs)))
        yield
        if isinstance(positional[0], Noted):
            self._noted[id(args[0])] = args[0], Noted(args[0]._version, func, positional, named)

    def function_of(self, tensor: Any) -> Noted | None:
        """Return the call that made a tensor, as far as that is known."""
        origin = self._origin(tensor)
        return origin if isinstance(origin, Noted) else None

    def _origin(self, leaf: Any) -> Any:
        """Return what stands in the place of a tensor: where it comes from, or ``_UNKNOWN``."""
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            return _UNKNOWN
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._inputs:
            _, version, origin = self._inputs[id(leaf)]
            return origin if version == leaf._version else _UNKNOWN
        _, noted = self._noted.get(id(leaf), (None, None))
        if noted is None and type(leaf) is Tensor and is_small(leaf) and not leaf.requires_grad:
            # No tensor of the trace: an attribute that is no buffer, say.
            return leaf
        return noted if noted is not None and noted.version == leaf._version else _UNKNOWN

    def find(self, asked: Tensor, names: Collection[str], most: int) -> Steps | None:
        """How a tensor comes from arguments by functions of PyTorch's of these names, of which there are ``most``
        steps or fewer; ``None`` where it does not."""
        places: dict[int, int] = {}
        steps: list[tuple[Any, Any, Any, int | None]] = []

        def visit(leaf: Any) -> Any:
            if leaf is _UNKNOWN:
                raise _NotFound
            if not isinstance(leaf, Noted):
                return leaf
            if id(leaf) not in places:
                if not _is_among(leaf.func, names) or leaf.kwargs.get("out") is not None:
                    raise _NotFound
                taken = pytree.tree_map(visit, (leaf.args, leaf.kwargs))
                places[id(leaf)] = len(steps)
                steps.append((_written(leaf.func) if leaf.func in WRITES else leaf.func, *taken, leaf.part))
                if len(steps) > most:
                    raise _NotFound
            return _Result(places[id(leaf)])

        origin = self._origin(asked)
        try:
            return Steps(tuple(steps) if isinstance(visit(origin), _Result) else ((torch.clone, (origin,), {}, None),))
        except _NotFound:
            return None


# Functions that write to their first argument.
WRITES = frozenset((Tensor.__setitem__, Tensor.masked_fill_, Tensor.fill_, Tensor.fill_diagonal_, Tensor.zero_))


def _written(write: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a function that runs ``write`` on a copy of its first argument and returns the copy."""

    def function(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        tensor = tensor.clone()
        write(tensor, *args, **kwargs)
        return tensor

    return function


def _is_among(function: Any, names: Collection[str]) -> bool:
    """Whether it is a function of PyTorch's of one of these names."""
    if function is torch._is_all_true:
        return True
    return getattr(function, "__name__", "") in names and bool(resolve_name(function))


class _NotFound(Exception):
    """A value is not computed from arguments in the way that was asked for."""
