# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tools of the toolchain, run as child processes: within limits, and never for longer than their parent waits."""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from retrograd.pipelines.analysis.partition.memory_size import parse_memory_size, resolve_memory_size

MEMORY_VARIABLE = "RETROGRAD_TOOL_MEMORY"
"""The environment variable that limits a tool's memory: ``8GiB``, or a fraction of the machine's (``0.5``)."""
SECONDS_VARIABLE = "RETROGRAD_TOOL_SECONDS"
"""The environment variable that limits how long a tool runs."""

_DEFAULT_SECONDS = 1800.0
# Of the machine's memory: what is left is for the process that waits.
_DEFAULT_MEMORY = 0.75
# What programs say that are refused memory: Python, LLVM, C++, the C library, IREE.
_OUT_OF_MEMORY = re.compile(
    "MemoryError|out of memory|std::bad_alloc|Cannot allocate memory|RESOURCE_EXHAUSTED|failed to map segment"
)
LONGEST_POLL = 2**31 - 1
"""Milliseconds, of 32 bits to the kernel: some weeks."""
_LAUNCHER = [sys.executable, "-I", "-S", str(Path(__file__).with_name("launcher.py"))]


@dataclass(frozen=True)
class ToolLimits:
    """The most that a tool may use: bytes of address space, and seconds from its start."""

    memory: int
    seconds: float

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ToolLimits:
        """The limits that ``RETROGRAD_TOOL_MEMORY`` and ``RETROGRAD_TOOL_SECONDS`` set; without them three quarters of
        the memory that this process may use, and half an hour.

        Raises:
            ValueError: a variable is unreadable, or not above zero.
        """
        memory = environment.get(MEMORY_VARIABLE, str(_DEFAULT_MEMORY))
        seconds = environment.get(SECONDS_VARIABLE, str(_DEFAULT_SECONDS))
        try:
            size, duration = parse_memory_size(memory), float(seconds)
        except ValueError as error:
            raise ValueError(f"{MEMORY_VARIABLE}={memory}, {SECONDS_VARIABLE}={seconds}: {error}") from error
        if not (math.isfinite(duration) and duration > 0):
            raise ValueError(f"{SECONDS_VARIABLE}={seconds} is no number of seconds above zero")
        return cls(resolve_memory_size(size, machine_memory()), duration)


@dataclass(frozen=True)
class ToolResult:
    """How a tool ended: ``returncode`` is negative where a signal ended it; ``stderr`` is what it said; ``exceeded`` is
    the limit that ended it, in words, with what to do about it."""

    returncode: int
    stderr: str
    exceeded: str | None = field(default=None)

    @property
    def crashed(self) -> str | None:
        """The name of the signal that ended the tool, if one did."""
        return signal.Signals(-self.returncode).name if self.returncode < 0 else None


def run_tool(command: Sequence[str | Path], *, folder: Path, limits: ToolLimits | None = None) -> ToolResult:
    """Run ``command`` in ``folder`` and wait for it, for as long as ``limits`` allow (else those of the environment).

    The child leads a process group of its own: on any exception here, Ctrl-C included, and when its time is over, the
    whole group is killed. On Linux it also ends where this process is killed.

    Raises:
        FileNotFoundError: there is no such program.
        ValueError: the limits that the environment sets are unreadable.
    """
    limits = limits or ToolLimits.from_environment()
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(f"no program {command[0]}")
    launch = [*_LAUNCHER, str(os.getpid()), str(limits.memory), program]
    with open(folder / "stderr.txt", "w+", encoding="utf-8", errors="replace") as stderr:
        process = subprocess.Popen(
            [*launch, *(str(part) for part in command[1:])],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
            env=tool_environment(),
        )
        try:
            returncode: int | None = _wait(process, limits.seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            returncode = None
        except BaseException:
            _kill(process)
            raise
        return read_result(stderr, returncode, limits)


def read_result(stderr: TextIO, returncode: int | None, limits: ToolLimits) -> ToolResult:
    """How a tool ended that wrote to ``stderr``; ``returncode`` is None where it was killed because its time was
    over."""
    stderr.seek(0)
    said = stderr.read()
    if returncode is None:
        exceeded = f"its limit of {limits.seconds:g} s; set {SECONDS_VARIABLE} to allow more"
        return ToolResult(-signal.SIGKILL, said, exceeded)
    if returncode and _OUT_OF_MEMORY.search(said):
        exceeded = f"its limit of {limits.memory / 2**20:,.0f} MiB of memory; set {MEMORY_VARIABLE} to allow more"
        return ToolResult(returncode, said, exceeded)
    return ToolResult(returncode, said)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait for the end of ``process``; returns how it ended.

    ``Popen.wait`` with a limit looks again every 50 ms, a tenth of the time that a small compilation takes. Linux tells
    of the end as it comes.

    Raises:
        subprocess.TimeoutExpired: it runs for longer than ``seconds``.
    """
    end = time.monotonic() + seconds
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
        # A kernel before 5.3, or a sandbox, may refuse it.
        with contextlib.suppress(OSError):
            ended = os.pidfd_open(process.pid)
            try:
                poll = select.poll()
                poll.register(ended, select.POLLIN)
                poll.poll(min(seconds * 1000, LONGEST_POLL))
            finally:
                os.close(ended)
    return process.wait(max(0.0, end - time.monotonic()))


def _kill(process: subprocess.Popen[bytes]) -> int:
    """Kill the group and give how its leader ended. ``Popen.wait`` would wait forever where the exception that brought
    us here came out of it right after it had taken its lock: it leaves that taken."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # It may have been waited for already.
    with contextlib.suppress(ChildProcessError):
        process.returncode = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
    return -signal.SIGKILL if process.returncode is None else process.returncode


def machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or those of its control group where these are fewer."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(Path(path).read_text(encoding="ascii")))
    return min(sizes)


def tool_environment() -> dict[str, str]:
    """This process's environment, without what would change how a tool of the toolchain behaves.

    glibc is told to keep more of what is freed at hand, and to ask for large pages: of MLIR's millions of small blocks
    iree-compile is a twentieth faster by it.
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONINSPECT", "PYTHONSTARTUP")}
    environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1:glibc.malloc.tcache_count=2000")
    return environment
