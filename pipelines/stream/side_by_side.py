# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Compiles parts of one module side by side, each in a process that is forked for it."""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

from retrograd.pipelines.stream.compiler import Dumps, Part
from retrograd.pipelines.toolchain.launcher import limit
from retrograd.pipelines.toolchain.module_parts import Parts, part_path


class CompilePart(Protocol):
    """:func:`compile_file`, of one module and one set of flags; says what the process is to end with."""

    def __call__(self, output: Path, dumps: Dumps, part: Part) -> int: ...


def compile_parts(parts: Parts, output: Path, dumps: Dumps, compile_part: CompilePart) -> int:
    """Compile each part to a file of its own, and write its dumps to others; both as :func:`part_path` names them.
    Returns what the process is to end with.

    This process must have one thread, and have compiled nothing. Where a part fails, the others are ended; where the
    compiler crashed, this process ends as it did.
    """
    parent = os.getpid()
    children: set[int] = set()
    try:
        for number, names in enumerate(parts):
            part = Part(f"part{number}", names)
            child = os.fork()
            if child == 0:
                _run(partial(compile_part, part_path(output, number), _dumps_of(dumps, number), part), parent)
            children.add(child)
        ended = _wait(children)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if ended < 0:
        signal.signal(-ended, signal.SIG_DFL)
        os.kill(parent, -ended)
    return ended


def _dumps_of(dumps: Dumps, number: int) -> Dumps:
    paths = (dumps.allocation, dumps.layout, dumps.phases)
    return Dumps(*(None if path is None else part_path(path, number) for path in paths))


def _wait(children: set[int]) -> int:
    """Wait until all have ended well, or one has not; returns how the last one ended, and takes out those that have."""
    while children:
        child, status = os.wait()
        children.discard(child)
        if ended := os.waitstatus_to_exitcode(status):
            return ended
    return 0


def _run(compile_it: Callable[[], int], parent: int) -> NoReturn:
    """Compile in a child, which ends with its parent, and end it."""
    status = 1
    try:
        # The limit of memory is the parent's, of each process by itself.
        limit(parent, resource.getrlimit(resource.RLIMIT_AS)[0])
        status = compile_it()
    except BaseException:  # noqa: BLE001  (it is said, and the process ends)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
