# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The OpenMP threads that torch leaves behind, out of the way of IREE's workers.

After a parallel region the threads of GNU's OpenMP spin for milliseconds, those of LLVM's and Intel's for 200 ms, in
the hope of another one. A compiled function that runs meanwhile shares every core but one with such a thread. Two
remedies: OpenMP 5.0, section 3.2.44, has a call that ends them, and the next parallel region starts new ones, for which
MKL has no buffers yet. GNU's spin a three thousandth as long while there are more of them than cores (`do_spin` in
`config/linux/wait.h` of libgomp), so that a few more, which sleep, have all of them sleep at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

# `omp_pause_soft` of omp.h: values of threadprivate variables and settings are kept.
_PAUSE_SOFT = 1
_MAPS = Path("/proc/self/maps")
# Where so many more threads would be needed the cores are many, and IREE's workers have others.
_MOST_SLEEPERS = 64
# Between the halves of a step, and from step to step, nothing is changed.
_LINGERING_SECONDS = 0.02


def release_threads() -> bool:
    """End the OpenMP threads that wait for the calling thread's next parallel region; says whether that was possible.

    Takes 0.2 us where there are none, else about 25 us and as much again in the next parallel region. A no-op where no
    OpenMP library is loaded or it is older than OpenMP 5.0, and where waiting threads sleep.
    """
    return not _sleepers.are_there and 0 in [pause(_PAUSE_SOFT) for pause in _find_pauses()]


@contextlib.contextmanager
def threads_sleep() -> Iterator[None]:
    """Have threads of GNU's OpenMP that wait, for the calling thread or another one, sleep at once during the block and
    some milliseconds after it.

    A parallel region takes 15 us more then, to wake them. Nothing happens where torch has another OpenMP.
    """
    # A child that is forked in the block has others.
    sleepers = _sleepers
    sleepers.enter()
    try:
        yield
    finally:
        sleepers.leave()


class _Sleepers:
    """Threads of libgomp that do nothing, a team of a thread of our own: there while somebody wants them."""

    def __init__(self) -> None:
        self.are_there = False
        self._changed = threading.Condition()
        self._process = os.getpid()
        self._users = 0
        self._thread: threading.Thread | None = None

    def enter(self) -> None:
        """One more wants them."""
        with self._changed:
            self._users += 1
            if not self.are_there and _find_gomp() is not None:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name="retrograd-openmp", daemon=True)
                    self._thread.start()
                self._changed.notify()

    def leave(self) -> None:
        """One less wants them."""
        if self._process != os.getpid():
            # A fork: the lock may be held for good, and the threads are the parent's.
            return
        with self._changed:
            self._users -= 1
            if self.are_there and not self._users:
                self._changed.notify()

    def _serve(self) -> None:
        library = _find_gomp()
        assert library is not None
        # C's `free` of a null pointer is what the team computes.
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._users)
            library.GOMP_parallel(nothing, None, ctypes.c_uint(_count_sleepers(library)), ctypes.c_uint(0))
            self.are_there = True
            with self._changed:
                while self._users or self._changed.wait_for(lambda: self._users, _LINGERING_SECONDS):
                    self._changed.wait_for(lambda: not self._users)
                self.are_there = False
            library.omp_pause_resource_all(_PAUSE_SOFT)


def _count_sleepers(library: ctypes.CDLL) -> int:
    """A team of this size makes libgomp's threads more than the cores, with one of torch's."""
    return max(int(library.omp_get_num_procs()) - torch.get_num_threads(), 0) + 3


@cache
def _find_gomp() -> ctypes.CDLL | None:
    """The one GNU OpenMP library in the process, if it is as new as is needed and the cores are not too many."""
    libraries = [lib for name, lib in _find_libraries().items() if name.startswith("libgomp")]
    if len(libraries) != 1 or not hasattr(libraries[0], "omp_pause_resource_all"):
        return None
    return libraries[0] if _count_sleepers(libraries[0]) <= _MOST_SLEEPERS else None


@cache
def _find_pauses() -> tuple[Callable[[int], int], ...]:
    """`omp_pause_resource_all` of each OpenMP library in the process: torch brings one, others may bring theirs."""
    return tuple(
        lib.omp_pause_resource_all for lib in _find_libraries().values() if hasattr(lib, "omp_pause_resource_all")
    )


@cache
def _find_libraries() -> dict[str, ctypes.CDLL]:
    """OpenMP libraries that are loaded, by the names of their files."""
    if not _MAPS.exists():
        return {}
    paths = set(re.findall(r"/\S*/lib(?:gomp|omp|iomp5)\b[^/\s]*\.so\S*", _MAPS.read_text(encoding="utf-8")))
    return {Path(path).name: ctypes.CDLL(path) for path in sorted(paths)}


def _forget_after_fork() -> None:
    """A forked child has none of the threads, and maybe a lock that the parent held."""
    global _sleepers
    _sleepers = _Sleepers()


_sleepers = _Sleepers()
os.register_at_fork(after_in_child=_forget_after_fork)
