# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Remembers the scopes of ``retrograd.enable()`` that a thread is in."""

from __future__ import annotations

from contextvars import ContextVar

from retrograd.options import BackwardRequest

# From the outermost to the one that counts.
ACTIVE: ContextVar[tuple[BackwardRequest, ...]] = ContextVar("retrograd.enable", default=())


def is_enabled() -> bool:
    """Whether the calling thread's next backward is to be captured."""
    return bool(ACTIVE.get())
