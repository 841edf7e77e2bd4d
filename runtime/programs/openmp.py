# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The OpenMP threads that torch leaves behind, out of the way of IREE's workers.

After a parallel region the threads of GNU's OpenMP spin for milliseconds, those of LLVM's and Intel's for 200 ms, in
the hope of another one. A compiled function that runs meanwhile shares every core but one with such a thread.
OpenMP 5.0, section 3.2.44, has a call that ends them; the next parallel region starts new ones.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

# `omp_pause_soft` of omp.h: values of threadprivate variables and settings are kept.
_PAUSE_SOFT = 1
_MAPS = Path("/proc/self/maps")


def release_threads() -> bool:
    """End the OpenMP threads that wait for the calling thread's next parallel region; says whether that was possible.

    Takes 0.2 us where there are none, else about 25 us and as much again in the next parallel region. A no-op where no
    OpenMP library is loaded or it is older than OpenMP 5.0.
    """
    return 0 in [pause(_PAUSE_SOFT) for pause in _find_pauses()]


@cache
def _find_pauses() -> tuple[Callable[[int], int], ...]:
    """`omp_pause_resource_all` of each OpenMP library in the process: torch brings one, others may bring theirs."""
    if not _MAPS.exists():
        return ()
    paths = set(re.findall(r"/\S*/lib(?:gomp|omp|iomp5)\b[^/\s]*\.so\S*", _MAPS.read_text(encoding="utf-8")))
    libraries = [ctypes.CDLL(path) for path in sorted(paths)]
    return tuple(lib.omp_pause_resource_all for lib in libraries if hasattr(lib, "omp_pause_resource_all"))
