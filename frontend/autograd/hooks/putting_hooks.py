# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds hooks whose code puts hooks on tensors: see ``engine/late_hooks.py``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

from retrograd.frontend.autograd.engine.custom_functions import own_backwards
from retrograd.frontend.autograd.hooks.hook_identity import is_library, is_set, names_in

# By what code puts hooks on tensors and nodes.
_PUTS = frozenset(
    {
        torch.Tensor.register_hook.__name__,
        torch.Tensor.register_post_accumulate_grad_hook.__name__,
        torch.Tensor.retain_grad.__name__,
        torch.autograd.graph.Node.register_prehook.__name__,
        torch.autograd.graph.register_multi_grad_hook.__name__,
    }
)
# Functions that call functions are looked at as far as this.
_DEEPEST = 4


def find_putting(hooks: Sequence[Any]) -> Any:
    """Find a hook, or the context of a custom function, whose code names what puts hooks on tensors, in itself or in
    functions of the user's that it calls by name; None where there is none."""
    return next((hook for hook in hooks if any(_puts(function, 0) for function in _functions_of(hook))), None)


def _functions_of(hook: Any) -> Iterator[Any]:
    while isinstance(hook, partial):
        hook = hook.func
    custom = getattr(hook, "_forward_cls", None)
    if custom is not None:
        yield from own_backwards(custom)
    elif isinstance(hook, (FunctionType, MethodType)):
        yield hook
    else:
        yield inspect.getattr_static(type(hook), "__call__", None)


def _is_own(function: FunctionType) -> bool:
    """Whether a function is retrograd's, which puts hooks on nodes of its own: what runs DDP's reducer does."""
    return (function.__module__ or "").partition(".")[0] == __name__.partition(".")[0]


def _puts(value: Any, depth: int) -> bool:
    if isinstance(value, MethodType):
        return _puts(value.__func__, depth)
    if not isinstance(value, FunctionType) or depth > _DEEPEST or is_library(value) or _is_own(value):
        return False
    names = names_in(value.__code__)
    if not _PUTS.isdisjoint(names):
        return True
    cells = [cell.cell_contents for cell in value.__closure__ or () if is_set(cell)]
    read = [value.__globals__[name] for name in names if name in value.__globals__]
    return any(_puts(other, depth + 1) for other in (*cells, *read) if other is not value)
