# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Replaces, while a model is traced, PyTorch's decompositions of ops into others that are differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch._C import DispatchKey
from torch._ops import OpOverload

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
Kernels = Mapping[DispatchKey, Callable[..., Any]]


@contextlib.contextmanager
def replaced_kernels(replacements: Iterable[tuple[OpOverload, Kernels]]) -> Iterator[None]:
    """While this is open, each op has these kernels in the place of PyTorch's decompositions into ops that are
    differentiated; with none it is an op with a backward of its own."""
    before: list[tuple[OpOverload, dict[Any, Any]]] = []
    for op, kernels in replacements:
        before.append((op, dict(op.py_kernels)))
        _set_kernels(op, {**{k: v for k, v in op.py_kernels.items() if k not in _KEYS}, **kernels})
    try:
        yield
    finally:
        for op, kept in reversed(before):
            _set_kernels(op, kept)


def _set_kernels(op: OpOverload, kernels: dict[Any, Any]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()
