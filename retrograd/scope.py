# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd.enable()``: every backward inside it is captured as it runs, compiled, and run compiled from then on."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch

from retrograd.active_scopes import ACTIVE, is_enabled
from retrograd.build import build_backward
from retrograd.contract.collectives import Collectives
from retrograd.frontend.autograd.engine.engine import CapturedFunction, Engine, standing_before
from retrograd.frontend.autograd.engine.family_lock import COMPILING
from retrograd.frontend.autograd.steps.captured import CapturedBackward
from retrograd.frontend.autograd.steps.history import History, Recompiles
from retrograd.frontend.autograd.tracing.compiler import RuntimeCapture
from retrograd.frontend.libraries.ops import library_ops
from retrograd.options import BackwardRequest
from retrograd.pipelines.analysis.hooks.hook_schedule import HookSchedule

_LOG = logging.getLogger("retrograd")


class _Client:
    """The one in the process that has backwards captured; the options are those of the scope that a backward is in."""

    def __init__(self) -> None:
        self.history = History(_LOG)

    def is_active(self) -> bool:
        return is_enabled()

    def times_backwards(self) -> bool:
        if not _active_options().leaves_slow or torch.are_deterministic_algorithms_enabled():
            return False
        return not (torch.distributed.is_available() and torch.distributed.is_initialized())

    def receive(self, capture: RuntimeCapture) -> CapturedFunction:
        return CapturedBackward(capture, self.history, _active_options, build_backward, _with_libraries).run

    def refuse(self, error: Exception) -> None:
        self.history.add_reason("runs eagerly", f"PyTorch cannot capture it: {error}")

    def leave(self, reason: str) -> None:
        self.history.add_reason("is left to PyTorch's engine", reason)


def _with_libraries(options: BackwardRequest) -> AbstractContextManager[None]:
    return library_ops(options.libraries)


_CLIENT = _Client()
_LOCK = threading.Lock()
_ENGINE = Engine(_CLIENT, COMPILING)
_scopes = 0
_standing = contextlib.ExitStack()


class Scope(contextlib.ContextDecorator):
    """A context or a decorator, as :func:`enable` gives it, for as many uses as wanted, one inside the other and in
    several threads too."""

    def __init__(self, options: BackwardRequest) -> None:
        self._options = options

    def __enter__(self) -> None:
        _open_scope()
        ACTIVE.set((*ACTIVE.get(), self._options))

    def __exit__(self, *exception: object) -> None:
        ACTIVE.set(ACTIVE.get()[:-1])
        _close_scope()


def enable(
    *,
    target: str | None = None,
    hook_schedule: HookSchedule = "eager-order",
    cache: bool = True,
    background: bool = False,
    fallback: Literal["island", "error"] = "island",
    kernels: str | Sequence[str] = "auto",
    collectives: Collectives | None = None,
    only_if_faster: bool = False,
) -> Scope:
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
        kernels: as for :func:`compile_backward`.
        collectives: how functional collectives of PyTorch's in the hooks that are inlined are joined and moved, a
            :class:`retrograd.Collectives`, for programs of which every process compiles the same; otherwise they start
            in the order in which they were captured, and are waited for when what they give is needed.
        only_if_faster: leave a backward of CPU tensors to PyTorch's engine where it takes longer compiled, as measured
            in turn while a model trains; not where there are several processes, hooks have a schedule of another kind,
            or ``torch.use_deterministic_algorithms`` is on. Which steps do so, and the last bits of gradients, hang
            on the time that they take. Without it, what can be compiled runs compiled.

    Raises:
        UnknownTarget, ValueError: no such target, schedule, fallback or family of kernels.
        TypeError: ``cache``, ``background`` or ``only_if_faster`` is neither True nor False, ``kernels`` neither text
            nor several texts, or ``collectives`` no ``Collectives``.
    """
    request = BackwardRequest(
        target=target,
        hook_schedule=hook_schedule,
        cache=cache,
        background=background,
        fallback=fallback,
        kernels=kernels,
        collectives=collectives,
        only_if_faster=only_if_faster,
    )
    return Scope(request)


def explain_recompiles() -> Recompiles:
    """Lists what :func:`enable` compiled so far, in order, each with why nothing compiled before served; and what runs
    eagerly, and why. Each prints as one line, that of the user's code first."""
    return Recompiles(_CLIENT.history.entries)


def _active_options() -> BackwardRequest:
    """Those of the scope that counts; the engine has nothing captured outside of one."""
    return ACTIVE.get()[-1]


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
