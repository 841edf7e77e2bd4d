# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compilation beside training: one thread, which waits for the processes that lower and compile."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
# How long the interpreter's exit waits for work that is not in a child process.
_EXIT_SECONDS = 2.0


class BackgroundWork(Generic[_T]):
    """A function's result, once the thread has come to it. What has not begun when the interpreter exits never does;
    what has is given up, and its child processes end with this one."""

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
        while (work := self._queue.get()) is not None and not self._closing:
            work.run()

    def _close(self, pid: int) -> None:
        if pid == os.getpid():
            self._closing = True
            self._queue.put(None)
            self._thread.join(_EXIT_SECONDS)


_WORKER = _Worker()
