# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd.enable()``: every backward inside it is captured as it runs, compiled, and run compiled from then on."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal

from retrograd.api import COMPILING
from retrograd.build import build_backward
from retrograd.frontend.autograd.captured import CapturedBackward
from retrograd.frontend.autograd.compiler import RuntimeCapture
from retrograd.frontend.autograd.engine import CapturedFunction, Engine, standing_before
from retrograd.frontend.autograd.history import History, Recompile
from retrograd.options import BackwardOptions

_LOG = logging.getLogger("retrograd")
_ACTIVE: ContextVar[BackwardOptions | None] = ContextVar("retrograd.enable", default=None)


class _Client:
    """The one in the process that has backwards captured; the options are those of the scope that a backward is in."""

    def __init__(self) -> None:
        self.history = History(_LOG)

    def is_active(self) -> bool:
        return _ACTIVE.get() is not None

    def receive(self, capture: RuntimeCapture) -> CapturedFunction:
        return CapturedBackward(capture, self.history, _ACTIVE.get, build_backward).run

    def refuse(self, error: Exception) -> None:
        self.history.add_refusal(error)


_CLIENT = _Client()
_LOCK = threading.Lock()
_ENGINE = Engine(_CLIENT, COMPILING)
_scopes = 0
_standing = contextlib.ExitStack()


@contextlib.contextmanager
def enable(
    *,
    target: str | None = None,
    hook_schedule: Literal["eager-order", "asap", "overlap", "fewest-stages"] = "eager-order",
    cache: bool = True,
    background: bool = False,
    fallback: Literal["island", "error"] = "island",
) -> Iterator[None]:
    """Compile every backward that runs in this context: ``with retrograd.enable():``, or as a decorator.

    A backward is captured as one graph, however the forward was run: in eager mode, under ``torch.compile``, in parts.
    The first time it runs eagerly, and is compiled then; afterwards, wherever it has the same structure, sizes and
    numbers, it runs compiled. Hooks and custom functions are called in Python, in eager's order. What cannot be
    compiled runs eagerly; `explain_recompiles` says what and why.

    Args:
        target: the kind of device to compile for; without it, the one that a backward's tensors are on.
        hook_schedule: when hooks run: ``eager-order`` as in eager mode; ``asap`` each as soon as it can; ``overlap``
            hooks that start communication first; ``fewest-stages`` so that the least compiled functions are called.
        cache: keep executables on disk.
        background: compile beside the training, which goes on eagerly meanwhile; a backward runs compiled from the
            first step on that begins when its compilation is done.
        fallback: what becomes of ops that cannot be compiled: ``island``, they run in torch between compiled functions;
            or ``error``, the whole backward runs eagerly.

    Raises:
        UnknownTarget, ValueError: no such target or schedule.
    """
    options = BackwardOptions(target, hook_schedule, cache, background, fallback)
    _open_scope()
    token = _ACTIVE.set(options)
    try:
        yield
    finally:
        _ACTIVE.reset(token)
        _close_scope()


def explain_recompiles() -> list[Recompile]:
    """What was compiled by :func:`enable` so far, in order, each with why nothing compiled before served; and what runs
    eagerly, and why. Each prints as one line."""
    return list(_CLIENT.history.entries)


def _open_scope() -> None:
    global _scopes
    with _LOCK:
        if _scopes == 0:
            _standing.enter_context(standing_before(_ENGINE))
        _scopes += 1


def _close_scope() -> None:
    global _scopes
    with _LOCK:
        _scopes -= 1
        if _scopes == 0:
            _standing.close()
