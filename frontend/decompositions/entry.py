# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Defines an entry of the decomposition table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._decomp import get_decompositions
from torch._ops import OpOverload

NO_LOWERING = "torch-mlir has no lowering for it"
"""The reason of most entries."""


@dataclass(frozen=True)
class Decomposition:
    """``function`` stands in for ``op`` while a graph is traced; it returns ``NotImplemented`` where the op is better
    kept. ``reason`` says in words what goes wrong, or how slow it is, without the entry."""

    op: OpOverload
    function: Callable[..., Any]
    reason: str


def from_pytorch(op: OpOverload) -> Callable[..., Any]:
    """PyTorch's own decomposition of ``op``, which torch-mlir's table leaves out."""
    function: Callable[..., Any] = get_decompositions([op])[op]
    return function
