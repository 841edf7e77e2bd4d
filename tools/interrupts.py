# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Remembers Ctrl-C: Python drops the exception where it comes in a callback or a destructor, as torch has them."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_SEEN = threading.Event()


def remember_interrupts() -> None:
    """Have SIGINT raise :class:`KeyboardInterrupt`, as ever, and be remembered for :func:`raise_if_interrupted`; in the
    main thread, the one that Python handles signals in."""
    _SEEN.clear()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)


def raise_if_interrupted() -> None:
    """Raise once more what was dropped, between two phases of a command.

    Raises:
        KeyboardInterrupt: SIGINT has come since :func:`remember_interrupts`.
    """
    if _SEEN.is_set():
        raise KeyboardInterrupt


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    _SEEN.set()
    raise KeyboardInterrupt
