# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Calls in a trace that kernels of our own may take: which they do, and why the others are decomposed."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from retrograd.contract.tensors import DTYPES

REFUSED = "retrograd_refused"
"""In the ``meta`` of a graph module: lines on calls that are decomposed, and why."""

Described = tuple[str, tuple[int | None, ...]]
"""A type of elements as MLIR spells it, and a shape in which an open size is ``None``."""

_ELEMENTS = {getattr(torch, name): element for element, name in DTYPES.items()}


class Call(Protocol):
    """A call that there may be kernels for."""

    def find_obstacle(self) -> str | None:
        """Why kernels of ours do not compute it; ``None`` where they do."""


class _Trace:
    """The families of kernels that a trace is for, and lines on what they do not take."""

    def __init__(self, families: Container[str]) -> None:
        self.families = families
        self.refusals: dict[str, None] = {}


_TRACE: ContextVar[_Trace | None] = ContextVar("retrograd_kernel_calls", default=None)


@contextmanager
def refusing_calls(families: Container[str]) -> Iterator[None]:
    """While this is open, calls that kernels of these families take are kept whole, and others noted."""
    token = _TRACE.set(_Trace(families))
    try:
        yield
    finally:
        _TRACE.reset(token)


def take_call(family: str, call: Call, what: str) -> bool:
    """Whether kernels of a family compute a call, which is described by ``what``; notes why they do not."""
    trace = _TRACE.get()
    if trace is None or family not in trace.families:
        return False
    obstacle = call.find_obstacle()
    if obstacle is not None:
        trace.refusals[f"{what}: IREE's code, {obstacle}"] = None
    return obstacle is None


def note_refusals(graph_module: torch.fx.GraphModule) -> None:
    """Write to a graph what was noted while it was traced."""
    trace = _TRACE.get()
    graph_module.meta[REFUSED] = () if trace is None else tuple(trace.refusals)


def describe_tensor(tensor: Tensor) -> Described:
    """The type of a tensor."""
    return _ELEMENTS.get(tensor.dtype, ""), tuple(size if isinstance(size, int) else None for size in tensor.shape)


def show_tensor(tensor: Described) -> str:
    """A type as MLIR spells it."""
    element, shape = tensor
    return f"tensor<{'x'.join([*('?' if size is None else str(size) for size in shape), element])}>"
