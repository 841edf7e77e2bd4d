# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Becomes another program that ends with its parent and is held to a limit of memory.

``python -I -S launcher.py PARENT MEMORY PROGRAM ARGUMENTS...``: the number of the process that waits for the program,
and bytes of address space. A program of its own, since code between fork and exec can hang in a process with threads.
It starts without ``site`` and imports nothing of the project: every tool waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

# <sys/prctl.h>; the setting outlives exec.
_PR_SET_PDEATHSIG = 1


def launch(parent: int, memory: int, command: list[str]) -> None:
    """Take the limits on and become ``command``.

    Raises:
        OSError: there is no such program.
        SystemExit: ``parent`` has ended already.
    """
    limit(parent, memory)
    os.execv(command[0], command)


def limit(parent: int, memory: int) -> None:
    """End with ``parent``, the process that started this one, and take no more than these bytes of address space.

    Raises:
        SystemExit: ``parent`` has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It may have ended before it was to be told of.
        if os.getppid() != parent:
            sys.exit(1)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    allowed = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    # macOS knows the limit and refuses to set it.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))


if __name__ == "__main__":
    launch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
