# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Large pages for large results on a CPU.

From 32 MiB on, glibc's allocator takes each piece of memory anew from the system and gives it back at once, and what is
smaller too where much was freed together, as gradients are: every page of it is a fault when it is first written to. By
pages of 4 KiB that takes three times as long as the writing itself; by pages of 2 MiB, which Linux gives where it is
asked to, about half as long. On memory that the process has, the question costs a microsecond.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache

import torch

LEAST_BYTES = 4 << 20
"""From here on a piece of memory holds a large page for certain, and the question is nothing beside the writing."""
_PAGE = 2 << 20
# Of Linux's `mman.h`; Python has it where it was built with such a header.
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", 14)


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask for large pages for all of a tensor's storage that whole ones fit in; values stay. Says whether the system
    took the advice: elsewhere than on Linux, and where it is switched off, it does not."""
    storage = tensor.untyped_storage()
    start, end = -(-storage.data_ptr() // _PAGE) * _PAGE, (storage.data_ptr() + storage.nbytes()) // _PAGE * _PAGE
    if end <= start or tensor.device.type != "cpu":
        return False
    advise = _find_advise()
    return advise is not None and advise(start, end - start, _ADVICE) == 0


@cache
def _find_advise() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise.restype = ctypes.c_int
    return advise
