# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Becomes another program that ends with its parent and is held to a limit of memory.

``python -I -S launcher.py PARENT MEMORY PROGRAM ARGUMENTS...``: the number of the process that waits for the program,
and bytes of address space. A program of its own, since code between fork and exec can hang in a process with threads.
It starts without ``site`` and imports nothing of the project: every tool waits for it. Of the standard library it
leaves out ``contextlib`` and ``signal``, which took as long as the rest of it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

# <sys/prctl.h>; the setting outlives exec.
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9


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
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
        # It may have ended before it was to be told of.
        if os.getppid() != parent:
            sys.exit(1)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    allowed = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
    except (ValueError, OSError):
        # macOS knows the limit and refuses to set it.
        return


if __name__ == "__main__":
    launch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
