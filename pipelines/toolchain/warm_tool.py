# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tools that are forked from a process which has them loaded: for what is run again and again, and starts slowly."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from retrograd.pipelines.toolchain.fork_server import LONGEST_NAME, REQUEST
from retrograd.pipelines.toolchain.subprocesses import (
    LONGEST_POLL,
    ToolLimits,
    ToolResult,
    read_result,
    run_tool,
    tool_environment,
)

# For a child that was killed to be waited for.
_KILLED_SECONDS = 30.0
_HAS_SERVERS = sys.platform == "linux" and hasattr(os, "pidfd_open")


class ServerLost(Exception):
    """The server ended before the tool did."""


class WarmTool:
    """A tool that ``program``, a module, is by itself and that ``server``, another, forks.

    The first time in a process it is run by itself, since the server takes as long to start; from then on the server
    does it, within the same limits and with the same results. Where there can be no server, or it was lost before it
    did anything, the tool always runs by itself.
    """

    def __init__(self, program: str, server: str) -> None:
        self.program, self._module = program, server
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._is_first = True
        self._usable = _HAS_SERVERS
        # A forked process may not talk to the server of the one that it came of: answers would come to either.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def run(self, arguments: Sequence[str], *, folder: Path, limits: ToolLimits | None = None) -> ToolResult:
        """Run the tool in ``folder`` and wait for it, as :func:`run_tool` does.

        Raises:
            ValueError: the limits that the environment sets are unreadable.
        """
        limits = limits or ToolLimits.from_environment()
        server = self._find_server(folder)
        if server is not None:
            try:
                return server.run(arguments, folder, limits)
            except ServerLost:
                self._lose(server)
        return run_tool([sys.executable, "-m", self.program, *arguments], folder=folder, limits=limits)

    def _find_server(self, folder: Path) -> _Server | None:
        with self._lock:
            first, self._is_first = self._is_first, False
            if first or not self._usable or len(os.fsencode(folder)) > LONGEST_NAME:
                return None
            if self._server is None or self._server.has_ended():
                self._server = _Server(self._module)
                atexit.unregister(self.close)
                atexit.register(self.close)
            return self._server

    @property
    def is_served(self) -> bool:
        """Whether a server has done it, and stands ready."""
        return self._server is not None and self._server.has_served

    def close(self) -> None:
        """End the server, and what it runs."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.end()

    def _lose(self, server: _Server) -> None:
        with self._lock:
            if self._server is server:
                self._server = None
                # One that had nothing to do for long has ended, as it should.
                self._usable = server.has_served
        server.end()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        if self._server is not None:
            self._server.forget()
        self._server, self._is_first = None, True


class _Server:
    """A process that forks a tool, and the socket that takes requests."""

    def __init__(self, module: str) -> None:
        self.has_served = False
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                # -P: nothing that lies in this process's folder is imported in place of what is installed.
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=tool_environment(),
            )

    def has_ended(self) -> bool:
        """Whether the process has."""
        return self._process.poll() is not None

    def forget(self) -> None:
        """Leave the process to the one that this one was forked from."""
        self._requests.close()
        self._process.returncode = 0

    def end(self) -> None:
        """Have the process end, and all that it forked."""
        self._requests.close()
        self._process.kill()
        self._process.wait()

    def run(self, arguments: Sequence[str], folder: Path, limits: ToolLimits) -> ToolResult:
        """Have the tool run in ``folder``.

        Raises:
            ServerLost: it cannot be told how the tool ended.
        """
        request = {"arguments": [*arguments], "environment": tool_environment(), "memory": limits.memory}
        (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        with open(folder / "stderr.txt", "w+", encoding="utf-8", errors="replace") as stderr:
            with self._ask(folder, stderr.fileno()) as job:
                returncode = self._wait(job, limits.seconds)
            self.has_served = True
            return read_result(stderr, returncode, limits)

    def _ask(self, folder: Path, stderr: int) -> socket.socket:
        job, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._requests, [os.fsencode(folder)], [theirs.fileno(), stderr])
            except OSError as error:
                job.close()
                raise ServerLost from error
        return job

    def _wait(self, job: socket.socket, seconds: float) -> int | None:
        """How the tool ended; None where its time was over."""
        poll = select.poll()
        poll.register(job, select.POLLIN)
        try:
            if poll.poll(min(seconds * 1000, LONGEST_POLL)):
                return _read(job)
        except BaseException:
            self._kill(job)
            raise
        self._kill(job)
        return None

    def _kill(self, job: socket.socket) -> None:
        """Have the tool killed, and wait for its end."""
        with contextlib.suppress(OSError, ServerLost):
            job.shutdown(socket.SHUT_WR)
            job.settimeout(_KILLED_SECONDS)
            _read(job)


def _read(job: socket.socket) -> int:
    """How the tool ended, as its server tells it."""
    try:
        told = job.recv(64)
    except ConnectionError as error:
        raise ServerLost from error
    if not told:
        raise ServerLost
    return int(told)
