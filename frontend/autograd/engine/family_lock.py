# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A lock of one backward, or of one trace, and of all that runs inside it, in whichever thread."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading

import torch

_NUMBERS = itertools.count()


def _counts_references() -> bool:
    """Whether this PyTorch holds a reference of its own to what it hands on: 2.11 gives one back that it never took."""
    given = object()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(given))
    before = sys.getrefcount(given)
    torch._C._stash_obj_in_tls("retrograd.family_lock", given)
    return sys.getrefcount(given) > before


_COUNTS = _counts_references()


def _hand_on(key: str, value: object) -> None:
    """Have PyTorch hand a value on to the threads of its engine."""
    if not _COUNTS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


class FamilyLock:
    """Held by who takes it first and by its descendants, one inside the other.

    PyTorch's engine runs a backward inside a backward in another thread when there are more than 60 of them, or when
    they are on a CUDA device, and waits for it: a lock that belongs to a thread would never be given. Who holds it is
    written where PyTorch keeps what a thread hands on to the engine's threads, such as its hooks for saved tensors.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key = f"retrograd.family_lock.{next(_NUMBERS)}"
        self._holder: object | None = None
        self._local = threading.local()

    def __enter__(self) -> None:
        taken: list[bool] = self._taken()
        holder = self._holder
        is_descendant = holder is not None and self._family() is holder
        if not is_descendant:
            self._lock.acquire()
            self._holder = object()
            _hand_on(self._key, self._holder)
        taken.append(not is_descendant)

    def __exit__(self, *exception: object) -> None:
        if self._taken().pop():
            # PyTorch 2.11 cannot remove one.
            _hand_on(self._key, None)
            self._holder = None
            self._lock.release()

    def _taken(self) -> list[bool]:
        """For each time that this thread entered and has not left: whether it took the lock then."""
        try:
            taken: list[bool] = self._local.taken
        except AttributeError:
            taken = self._local.taken = []
        return taken

    def _family(self) -> object | None:
        return torch._C._get_obj_in_tls(self._key) if torch._C._is_key_in_tls(self._key) else None


# PyTorch's tracer keeps its state in globals: two threads that trace at once break it for the whole process.
COMPILING = FamilyLock()
# Held while settings of PyTorch's, which all threads share, are others than the user's, and by who reads them.
SETTINGS = FamilyLock()
