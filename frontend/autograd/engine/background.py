# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compilation beside training: one thread, which waits for the processes that lower and compile."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
# How long the interpreter's exit waits for work that may be in a child process, and for work in this one.
_EXIT_SECONDS = 2.0
_MOST_SECONDS = 60.0
# Modules in which a thread waits for a child process.
_WAITING = {("toolchain", "subprocesses.py"), ("toolchain", "warm_tool.py")}


class BackgroundWork(Generic[_T]):
    """A function's result, once the thread has come to it. What has not begun when the interpreter exits never does;
    what has is interrupted by :class:`Closing`, and its child processes end with this one."""

    def __init__(self, function: Callable[[], _T]) -> None:
        self._function = function
        self._finished = threading.Event()
        self._result: _T | None = None
        self._error: BaseException | None = None
        _WORKER.add(self)

    @property
    def is_done(self) -> bool:
        """Whether `result` has something to give."""
        return self._finished.is_set()

    def result(self) -> _T:
        """Wait for the function and return its result.

        Raises:
            BaseException: what the function raised.
        """
        self._finished.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def run(self) -> None:
        """Call the function; in the thread."""
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 (raised where the result is asked for)
            self._error = error
        finally:
            # What it holds, a graph among it, is not needed any more.
            del self._function
            self._finished.set()


class Closing(BaseException):
    """The interpreter exits: raised in the thread, wherever it is in Python."""


class _Worker:
    """The thread; a fork starts one of its own."""

    def __init__(self) -> None:
        self._pid = -1
        self._lock = threading.Lock()
        self._closing = False

    def add(self, work: BackgroundWork[Any]) -> None:
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._queue: SimpleQueue[BackgroundWork[Any] | None] = SimpleQueue()
                # A daemon: the exit does not wait for a compiler.
                self._thread = threading.Thread(target=self._work, name="retrograd-compiler", daemon=True)
                self._thread.start()
                atexit.register(self._close, self._pid)
            self._queue.put(work)

    def _work(self) -> None:
        with contextlib.suppress(Closing):
            while (work := self._queue.get()) is not None and not self._closing:
                work.run()

    def _close(self, pid: int) -> None:
        """End the thread. One that is still in torch or MLIR when the interpreter is gone would end the process with
        an error: C++ does not let a thread end within it. One that waits in Python may be left."""
        if pid != os.getpid():
            return
        # Before the thread can end by itself: raised behind its loop, it would be told to the user as an error.
        _raise_in(self._thread)
        self._closing = True
        self._queue.put(None)
        start = time.monotonic()
        while self._thread.is_alive() and (passed := time.monotonic() - start) < _MOST_SECONDS:
            if passed > _EXIT_SECONDS and _waits(self._thread):
                return
            self._thread.join(0.05)


def _raise_in(thread: threading.Thread) -> None:
    """Raise :class:`Closing` in a thread as soon as it runs Python again."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Closing))


def _waits(thread: threading.Thread) -> bool:
    """Whether a thread waits for a lock or a queue in Python's own library, or for a process in the toolchain."""
    frame = sys._current_frames().get(-1 if thread.ident is None else thread.ident)
    if frame is None:
        return True
    folder, name = os.path.split(frame.f_code.co_filename)
    return folder == os.path.dirname(threading.__file__) or (os.path.basename(folder), name) in _WAITING


_WORKER = _Worker()
