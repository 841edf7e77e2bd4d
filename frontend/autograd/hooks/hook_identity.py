# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Identifies hooks that were compiled into a backward: another hook, or the same one with another number in its
closure, has another identity."""

from __future__ import annotations

import inspect
import weakref
from array import array
from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache, partial
from io import IOBase
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch

# What counts by its value.
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.layout)
# Attributes named in code that lead further than this lead to something that is no number of the user's.
_DEEPEST = 8
_CACHED = type(lru_cache(len))
_GRADIENT = torch.Tensor.grad.__name__  # type: ignore[union-attr]


class Same:
    """Stands for an object in a key: equal to that of the same object as long as this lives."""

    __slots__ = ("_hash", "_object")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._object: Any = weakref.ref(value)
        except TypeError:
            self._object = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and (value := self._object()) is not None and value is other._object()

    def __repr__(self) -> str:
        return f"<{type(self._object()).__name__}>"


class HookIdentity:
    """Reads hooks; ``tensors`` are those that their code can reach, ``optimizers`` too.

    The code says what it reads: free variables, defaults, globals and attributes by name. Numbers, strings and the like
    count by value, containers and optimizers by what they hold, functions of the user's by what they read in turn, all
    else by identity. One of these reads the hooks of one backward: the same hook twice is looked at once. ``obstacles``
    say of hooks, by id, what they read of which there is no telling whether it is the same.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.obstacles: dict[int, str] = {}
        self._found: list[str] = []
        self._known: dict[int, Hashable] = {}
        self._running: set[tuple[int, int]] = set()

    def read(self, hook: Any) -> Hashable:
        """The identity of a hook."""
        key = id(hook)
        if key not in self._known:
            self._found.clear()
            self._known[key] = self._callable(hook, 0)
            if self._found:
                self.obstacles[key] = self._found[0]
        return self._known[key]

    def _callable(self, hook: Any, depth: int) -> Hashable:
        if isinstance(hook, torch.fx.GraphModule):
            held = [*hook.parameters(), *hook.buffers()]
            constants = [v for name, v in vars(hook).items() if isinstance(v, torch.Tensor) and name[:1] == "_"]
            return (Same(hook), tuple([self._value(t, (), depth) for t in (*held, *constants)]))
        if isinstance(hook, (FunctionType, MethodType, partial, BuiltinMethodType, MethodWrapperType, _CACHED)):
            return self._value(hook, (), depth)
        call = inspect.getattr_static(type(hook), "__call__", None)
        if isinstance(call, FunctionType) and not is_library(type(hook)):
            return self._value(MethodType(call, hook), (), depth)
        return Same(hook)

    def _value(self, value: Any, names: Collection[str], depth: int) -> Hashable:
        """The identity of a value in code that reads the attributes called ``names``."""
        if isinstance(value, PLAIN):
            return (type(value), value)
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
            if not names:
                return Same(value)
            # What code may ask a tensor; of one that an optimizer holds, none does.
            has_gradient = _GRADIENT in names and value.is_leaf and value.grad is not None
            return (Same(value), value.shape, value.dtype, value.requires_grad, has_gradient)
        key = (id(value), hash(names))
        if depth > _DEEPEST or key in self._running:
            return Same(value)
        self._running.add(key)
        try:
            return self._compound(value, names, depth + 1)
        finally:
            self._running.discard(key)

    def _compound(self, value: Any, names: Collection[str], depth: int) -> Hashable:
        match value:
            case torch.optim.Optimizer():
                return self._optimizer(value, depth)
            case list() | tuple() | set() | frozenset() | deque():
                return (type(value), tuple([self._value(part, names, depth) for part in value]))
            case bytearray() | array():
                return (type(value), bytes(value))
            case weakref.ref():
                return (Same(value), self._value(value(), names, depth))
            case ContextVar():
                return (Same(value), self._value(value.get(None), names, depth))
            case Mapping():
                parts = [(self._value(k, (), depth), self._value(v, names, depth)) for k, v in value.items()]
                return (type(value), tuple(parts))
            case partial():
                parts = [*value.args, *value.keywords.values()]
                return (self._callable(value.func, depth), *[self._value(part, names, depth) for part in parts])
            case MethodType():
                return (self._value(value.__func__, (), depth), self._of_method(value, depth))
            case BuiltinMethodType() | MethodWrapperType() if not isinstance(value.__self__, (ModuleType, type(None))):
                # Of a list, a dict or an iterator; two of one object are equal, and not the same.
                return (value.__name__, self._value(value.__self__, (), depth))
            case FunctionType() if not is_library(value):
                return self._function(value, depth)
            case ModuleType() | type() if is_library(value):
                return Same(value)
            case _:
                if (obstacle := _find_obstacle(value)) is not None:
                    self._found.append(obstacle)
                return (Same(value), self._attributes(value, names, depth))

    def _function(self, function: FunctionType, depth: int) -> Hashable:
        code = function.__code__
        names = names_in(code)
        cells = [self._value(cell.cell_contents, names, depth) for cell in function.__closure__ or () if is_set(cell)]
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        read = [function.__globals__[name] for name in names if name in function.__globals__]
        return (
            Same(code),
            tuple(cells),
            tuple([self._value(default, names, depth) for default in defaults]),
            tuple([self._value(value, names, depth) for value in read]),
        )

    def _of_method(self, method: MethodType, depth: int) -> Hashable:
        code = getattr(method.__func__, "__code__", None)
        return self._value(method.__self__, names_in(code) if code is not None else (), depth)

    def _attributes(self, value: Any, names: Collection[str], depth: int) -> Hashable:
        """Identify what code finds under the names that it reads, in an object, a class or a module: of an object of a
        user's class, methods that Python calls by itself as well."""
        own = getattr(value, "__dict__", {})
        found = []
        for name in (*names, *_special_methods(type(value))):
            if name in own:
                found.append((name, self._value(own[name], names, depth)))
                continue
            static = inspect.getattr_static(value, name, None)
            if isinstance(static, property):
                static = static.fget
            if isinstance(static, FunctionType):
                if not is_library(static):
                    found.append((name, self._value(MethodType(static, value), (), depth)))
            elif isinstance(static, MemberDescriptorType):
                found.append((name, self._value(getattr(value, name, None), names, depth)))
            elif static is not None and not isinstance(value, ModuleType):
                found.append((name, self._value(static, names, depth)))
        return tuple(found)

    def _optimizer(self, optimizer: torch.optim.Optimizer, depth: int) -> Hashable:
        self.optimizers.append(optimizer)
        groups = []
        for group in optimizer.param_groups:
            left = ("params", "lr") if reads_rate(optimizer, group) else ("params",)
            numbers = [(name, self._value(part, (), depth)) for name, part in group.items() if name not in left]
            states = [self._value(optimizer.state.get(p), (), depth) for p in group["params"]]
            groups.append((tuple([self._value(p, (), depth) for p in group["params"]]), tuple(numbers), tuple(states)))
        return (Same(optimizer), tuple(groups))


def reads_rate(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a compiled step reads the learning rate at each step: PyTorch's optimizers of these classes, compiled,
    take a tensor in its place."""
    plain = type(optimizer) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    return plain and isinstance(group["lr"], float) and not (group.get("fused") or group.get("differentiable"))


# Modules that give another value at each call.
_CHANGING = ("random", "time", "datetime", "secrets", "uuid", "numpy.random")


def _find_obstacle(value: Any) -> str | None:
    """Why there is no telling whether what code reads of a value is the same; None where there is."""
    if isinstance(value, _CACHED):
        return f"it calls {getattr(value, '__name__', 'a function')}, which keeps what it gave (functools.lru_cache)"
    # Files are, and a hook that writes to one reads nothing.
    if isinstance(value, Iterator) and not isinstance(value, IOBase):
        return f"it reads an iterator ({type(value).__name__})"
    if type(value).__module__ == "numpy" and hasattr(value, "__array_interface__") and hasattr(value, "setflags"):
        return "it reads a NumPy array"
    owner = getattr(value, "__self__", value)
    name = owner.__name__ if isinstance(owner, ModuleType) else getattr(owner, "__module__", None)
    module = str(name or type(owner).__module__)
    return f"it calls {module}, which gives another value each time" if module in _CHANGING else None


def _special_methods(kind: type) -> tuple[str, ...]:
    """The methods of a user's class that operators call; not those that make an object or show it."""
    if is_library(kind):
        return ()
    names = dict.fromkeys(n for base in kind.__mro__ for n, f in vars(base).items() if isinstance(f, FunctionType))
    return tuple([name for name in names if name[:2] == "__" and name not in _UNSEEN])


_UNSEEN = ("__init__", "__new__", "__repr__", "__str__", "__init_subclass__", "__post_init__", "__del__", "__hash__")


def is_library(value: Any) -> bool:
    """Whether something is torch's own, whose code reads no number of the user's; or pytest's, which puts names of its
    own into asserts."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return name.partition(".")[0] in ("torch", "builtins", "math", "functools", "_pytest")


def names_in(code: CodeType) -> tuple[str, ...]:
    """The globals and attributes that code reads, that of the functions inside it included."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            # As getattr takes it.
            names[constant] = None
        if isinstance(constant, CodeType):
            names |= dict.fromkeys(names_in(constant))
    return tuple(names)


def is_set(cell: Any) -> bool:
    """Whether a cell of a closure has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
