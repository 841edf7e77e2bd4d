# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tells hooks that compute from hooks that do more, by their code: a trace has what the first compute, and does not
repeat what the others do besides."""

from __future__ import annotations

import builtins
import collections
import dis
import inspect
import logging
import queue
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from retrograd.frontend.hooks.hook_marks import is_inlineable
from retrograd.frontend.python.python_functions import cells_of, global_names, names_in
from retrograd.frontend.python.source_locations import is_user_file

# Functions that call functions are looked at as far as this.
_DEEPEST = 4
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size, slice)
_WRITES = ("STORE_GLOBAL", "STORE_NAME", "STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "DELETE_", "IMPORT_", "YIELD_")
# An object's own functions run where a text is made of it.
_TEXTS = ("FORMAT_", "CONVERT_VALUE")
# What is called by neither its global name nor as a method stands beside this, behind it from Python 3.13 on.
_CALLED, _BESIDE = "PUSH_NULL", 1 if sys.version_info < (3, 13) else -1
_COMPUTING = frozenset(
    (
        *(abs, all, any, bool, divmod, enumerate, float, getattr, hasattr, int, isinstance, len, list, max, min, pow),
        *(range, reversed, round, slice, sum, tuple, type, zip),
    )
)
# Methods of tensors, and those of them that are also methods of what is written to.
_OF_TENSORS = frozenset(dir(torch.Tensor)) | frozenset(dir(torch)) | frozenset(dir(torch.nn.functional))
_OF_OTHERS = frozenset(
    name
    for kind in (list, set, dict, bytearray, collections.deque, collections.Counter, queue.Queue, logging.Logger)
    for name in dir(kind)
)
# What functions and attributes are in a class, which gives them as they are.
_IN_CLASSES = (FunctionType, BuiltinFunctionType, staticmethod, classmethod, property, type)
_BINDING = (*_IN_CLASSES, MemberDescriptorType, GetSetDescriptorType, MethodDescriptorType, WrapperDescriptorType)
# Special methods that code calls by name, or by making an object; contexts are looked at by themselves.
_NEVER_UNNAMED = frozenset(
    f"__{name}__"
    for name in (
        *("init", "new", "del", "init_subclass", "class_getitem", "set_name", "post_init", "enter", "exit"),
        *("repr", "str", "format", "sizeof", "dir", "setattr", "delattr", "setitem", "delitem", "call"),
        *("reduce", "reduce_ex", "getstate", "setstate", "getnewargs", "getnewargs_ex", "copy", "deepcopy"),
    )
)
# Functions that may write to an argument, which is not seen where it is given by its place.
_WRITING = frozenset(
    (
        *(name for name, f in vars(torch.nn.functional).items() if "inplace" in getattr(f, "__annotations__", ())),
        *(
            "batch_norm",
            "embedding",
            "embedding_bag",
            "instance_norm",
            "native_batch_norm",
            "threshold",
            "celu",
            "selu",
        ),
    )
)
# By these a tensor's contents become Python's.
_TELLING = frozenset(("item", "tolist", "numpy", "save", "is_nonzero"))
# By these what PyTorch does from then on is another; so it is by all that begin with "set_".
_SETTING = frozenset(("manual_seed", "initial_seed"))
# PyTorch's own functions that do more than to compute.
_OF_MORE = ("torch.distributed", "torch.serialization", "torch.random", "torch.cuda", "torch.utils", "torch.autograd")


def of_several(hook: Any) -> bool:
    """Whether PyTorch has made a hook of one for several gradients, of ``register_multi_grad_hook``."""
    return getattr(getattr(hook, "__code__", None), "co_filename", None) == torch.autograd.graph.__file__


def only_computes(hook: Callable[..., Any]) -> bool:
    """Whether all that a hook does is seen to be computing what it gives; so is what is marked as `inlineable`, and
    functions of PyTorch's."""
    return is_inlineable(hook) or _computes(hook, 0, ())


def _computes(value: Any, depth: int, within: Collection[FunctionType]) -> bool:
    """Whether a function only computes, where those of ``within`` do, which led to it."""
    if depth > _DEEPEST:
        return False
    if isinstance(value, partial):
        return _computes(value.func, depth, within) and all(map(_is_value, (*value.args, *value.keywords.values())))
    if (
        of_several(value)
        or str(getattr(value, "__module__", "")).startswith(_OF_MORE)
        or _is_effect(name := str(getattr(value, "__name__", "")))
        or _is_in_place(name)
    ):
        return False
    if isinstance(value, BuiltinFunctionType | type):
        return _is_torchs(value) or value in _COMPUTING
    owner = [value.__self__] if isinstance(value, MethodType) else []
    function = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True
    if not isinstance(function, FunctionType):
        return _is_torchs(value)
    if any(function is one for one in within):
        return True
    within = (*within, function)
    if not is_user_file(function.__code__.co_filename):
        # What PyTorch has made of the user's functions, as of one that is decorated, calls these.
        inner = [part for part in cells_of(function).values() if callable(part) and not _is_torchs(part)]
        return all(_computes(part, depth + 1, within) for part in inner)
    roots = [*owner, *_read(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    functions = [root for root in roots if callable(root) and not isinstance(root, torch.nn.Module | torch.Tensor)]
    others = [root for root in roots if not (_is_value(root) or _is_torchs(root) or any(root is f for f in functions))]
    names = {*names_in(function.__code__)}
    if names & {"getattr", "hasattr"}:
        names.update(root for root in roots if isinstance(root, str))
    reached = _reached(others, names)
    # What has a next element has another one each time.
    if any(hasattr(type(value), "__next__") for value in reached):
        return False
    if not all(_computes(code, depth + 1, within) for value in reached for code in _run_unnamed(value, names)):
        return False

    def is_tensors(name: str) -> bool:
        if _is_effect(name) or name not in _OF_TENSORS:
            return False
        return not others or not (name in _OF_OTHERS or any(hasattr(other, name) for other in reached))

    read = {**vars(builtins), **function.__globals__, **cells_of(function)}
    called = {name for name, found in read.items() if callable(found) and not isinstance(found, torch.nn.Module)}
    has_tensors = any(isinstance(root, torch.Tensor) for root in roots)
    code = _Code(is_tensors, called - {*function.__code__.co_cellvars}, bool(others), bool(others) or has_tensors)
    return code.is_pure(function.__code__) and all(_computes(f, depth + 1, within) for f in functions if f is not value)


def _is_effect(name: str) -> bool:
    return name in _TELLING or name in _SETTING or name.startswith("set_")


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _read(function: FunctionType) -> Iterator[Any]:
    """List what code reads from globals, builtins and its closure."""
    yield from cells_of(function).values()
    for name in global_names(function.__code__):
        yield function.__globals__.get(name, getattr(builtins, name, None))


def _reached(others: Sequence[Any], names: Collection[str]) -> list[Any]:
    """List what code comes to from these objects by attributes of these names, and what containers among them hold."""
    found: dict[int, Any] = {}
    waiting = [*others]
    while waiting:
        value = waiting.pop()
        if id(value) in found or _is_value(value) or _is_torchs(value):
            continue
        found[id(value)] = value
        if isinstance(value, tuple | list | set | frozenset):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        modules = getattr(value, "__dict__", {}).get("_modules") or {}
        waiting.extend(modules[name] for name in names if name in modules)
        waiting.extend(_attributes(value, names))
    return [*found.values()]


def _attributes(value: Any, names: Collection[str]) -> Iterator[Any]:
    """The attributes of these names that an object has, or its class, without running code for them."""
    for name in names:
        found = inspect.getattr_static(value, name, None)
        if isinstance(found, MemberDescriptorType):
            # A slot, which may be empty.
            found = getattr(value, name, None)
        if not isinstance(found, FunctionType | staticmethod | classmethod | property):
            yield found


def _run_unnamed(value: Any, names: Collection[str]) -> Iterator[Callable[..., Any]]:
    """The functions of the user's that run where code reads attributes of these names from an object, or has an
    operator, a loop or an index of it."""
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, property) and name in names and member.fget is not None:
                yield MethodType(member.fget, value)
            elif name.startswith("__") and name not in _NEVER_UNNAMED and isinstance(member, FunctionType):
                yield MethodType(member, value)
            elif name in names and hasattr(type(member), "__get__") and not isinstance(member, _BINDING):
                yield type(member).__get__


@dataclass(frozen=True)
class _Code:
    """Says how code is looked at. ``is_tensors`` tells the names of tensors' methods; ``called`` are those names of its
    closure and globals that are called as they are. ``has_others`` says that it has more than tensors and numbers to
    write to, ``has_written`` that it has that or tensors, which it may also know by other names."""

    is_tensors: Callable[[str], bool]
    called: Collection[str]
    has_others: bool
    has_written: bool

    def is_pure(self, code: CodeType) -> bool:
        """Whether code writes to nothing but its own variables, and calls functions that it names, and methods of
        tensors, by their names."""
        # Both are among the names of a call's arguments, or keys of a dict of them.
        constants = [name for c in code.co_consts for name in (c if isinstance(c, tuple) else (c,))]
        if "out" in constants or "inplace" in constants:
            return False
        if self.has_written and not _WRITING.isdisjoint(code.co_names):
            return False
        steps = [*dis.get_instructions(code)]
        if not all(self._is_pure(code, steps, place) for place in range(len(steps))):
            return False
        return all(self.is_pure(part) for part in code.co_consts if isinstance(part, CodeType))

    def _is_pure(self, code: CodeType, steps: Sequence[dis.Instruction], place: int) -> bool:
        step = steps[place]
        name = step.opname
        if name.startswith(_WRITES) or (name == "STORE_DEREF" and step.argval in code.co_freevars):
            return False
        if name == _CALLED:
            beside = steps[place + _BESIDE]
            if beside.opname == "LOAD_ATTR":
                # A function of a module that is imported, from Python 3.13 on.
                return self._is_fresh(beside, steps[place - 2])
            return beside.opname == "LOAD_DEREF" and beside.argval in self.called
        if name == "LOAD_GLOBAL" and "NULL" in step.argrepr and step.argval not in self.called:
            # A function of a module that is imported.
            return steps[place + 1].opname == "LOAD_ATTR" and self._is_fresh(steps[place + 1], step)
        # `+=` writes to a list or a tensor, and a context may do anything.
        if self.has_others and (name == "BEFORE_WITH" or name.startswith(_TEXTS)):
            return False
        if self.has_written and name == "BINARY_OP" and step.argrepr.endswith("="):
            return False
        # A call with arguments by names that are not told here.
        if self.has_written and name == "CALL_FUNCTION_EX" and (step.arg or 0) & 1:
            return False
        # From Python 3.12 on methods are loaded as attributes are, with "NULL|self + " before their name in the text.
        is_method = name == "LOAD_METHOD" or (name == "LOAD_ATTR" and "NULL|self" in step.argrepr)
        if name == "LOAD_ATTR" and not is_method and self.has_written and _is_in_place(step.argval):
            return False
        return not is_method or self._is_fresh(step, steps[place - 1])

    def _is_fresh(self, method: dis.Instruction, before: dis.Instruction) -> bool:
        """Whether a method is one of tensors, and writes to none but what code has computed."""
        has_name = self.has_written or before.opname in ("LOAD_DEREF", "LOAD_GLOBAL", "LOAD_ATTR")
        return self.is_tensors(method.argval) and not (has_name and _is_in_place(method.argval))


def _is_value(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_value, value))
    return isinstance(value, (*_PLAIN, torch.Tensor))


def _is_torchs(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    owner = getattr(value, "__self__", None)
    if isinstance(value, BuiltinFunctionType) and owner is not None and not isinstance(owner, ModuleType):
        return isinstance(owner, type) and _is_torchs(owner)
    is_known = isinstance(name, str) and name.partition(".")[0] in ("torch", "math")
    return is_known and not isinstance(value, torch.nn.Module)


def tensors_behind(hook: Any) -> Iterator[torch.Tensor]:
    """The tensors that a hook has by its closure, its defaults and arguments, and in containers there."""
    waiting, seen = [hook], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list | set | frozenset):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, partial):
            waiting.extend((value.func, value.args, value.keywords))
        elif isinstance(value, MethodType):
            waiting.append(value.__func__)
        elif of_several(value):
            waiting.append(getattr(value, "__wrapped__", None))
        elif isinstance(value, FunctionType) and is_user_file(value.__code__.co_filename):
            waiting.extend((*cells_of(value).values(), value.__defaults__, value.__kwdefaults__))
