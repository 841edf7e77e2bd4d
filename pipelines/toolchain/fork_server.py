# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The server's half of tools that are forked, not started: :mod:`retrograd.pipelines.toolchain.warm_tool` is the other
half.

A message on the server's socket is a folder, with two files: one end of a pair of sockets that is the job's alone, and
where the tool's standard error goes. ``request.json`` in the folder has the rest. The job's socket gets how the child
ended; where its other end is closed, for writing or altogether, the child and all that it started is killed.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrograd.pipelines.toolchain.launcher import limit

REQUEST = "request.json"
"""The file in a job's folder that says what to run: ``arguments``, ``environment`` and ``memory`` in bytes."""
LONGEST_NAME = 4096
"""Bytes that a folder's name may take."""
# With nothing to do: a server holds some tens of MiB.
_IDLE_SECONDS = 60.0


@dataclass
class _Job:
    """A child that runs: its number, a file that is readable when it has ended, and the socket that is told."""

    child: int
    ended: int
    reply: socket.socket
    killed: bool = False


class ForkServer:
    """Runs ``tool`` on the arguments of each request in a forked child, several at once. This process must have one
    thread: a lock that another one held would stay locked in the child."""

    def __init__(self, requests: int, parent: int, tool: Callable[[Sequence[str]], int]) -> None:
        self._requests = socket.socket(fileno=requests)
        self._tool = tool
        self._jobs: list[_Job] = []
        self._parent = os.pidfd_open(parent)

    def serve(self) -> None:
        """Run until there is nobody to run for."""
        while True:
            poll = select.poll()
            poll.register(self._parent, select.POLLIN)
            poll.register(self._requests, select.POLLIN)
            for job in self._jobs:
                poll.register(job.ended, select.POLLIN)
                if not job.killed:
                    poll.register(job.reply, select.POLLIN)
            ready = {file for file, _ in poll.poll(None if self._jobs else _IDLE_SECONDS * 1000)}
            for job in [*self._jobs]:
                self._attend(job, ready)
            if self._parent in ready or not (ready or self._jobs):
                return
            if self._requests.fileno() in ready and not self._accept():
                return

    def _attend(self, job: _Job, ready: set[int]) -> None:
        """Kill a child that nobody waits for, and tell of one that has ended."""
        if job.ended in ready:
            _, status = os.waitpid(job.child, 0)
            self._jobs.remove(job)
            os.close(job.ended)
            with job.reply:
                _tell(job.reply, os.waitstatus_to_exitcode(status))
        elif not job.killed and job.reply.fileno() in ready:
            job.killed = True
            # It has not been waited for: the number is still its own.
            os.killpg(job.child, signal.SIGKILL)

    def _accept(self) -> bool:
        """Take a request and start its child; returns False where there will be none."""
        folder, files, _, _ = socket.recv_fds(self._requests, LONGEST_NAME, 2)
        if not folder or len(files) != 2:
            return False
        reply, said = socket.socket(fileno=files[0]), files[1]
        server = os.getpid()
        child = os.fork()
        if child == 0:
            self._run(server, Path(os.fsdecode(folder)), reply, said)
        # The child does it too: whoever kills the group finds it.
        os.setpgid(child, child)
        os.close(said)
        self._jobs.append(_Job(child, os.pidfd_open(child), reply))
        return True

    def _run(self, server: int, folder: Path, reply: socket.socket, said: int) -> None:
        """Run the tool and end this child."""
        status = 1
        try:
            os.setpgid(0, 0)
            _stand_in(said)
            for job in self._jobs:
                job.reply.close()
                os.close(job.ended)
            reply.close()
            self._requests.close()
            request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(request["environment"])
            _refuse_less_than_taken(request["memory"])
            limit(server, request["memory"])
            status = self._tool(request["arguments"])
        # As the interpreter does it for a program of its own.
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)


def serve(tool: Callable[[Sequence[str]], int]) -> None:
    """Run ``tool`` for the socket and the process that the command line names; returns when its work is over. Call it
    when everything is loaded: the children's walks for garbage leave those pages shared."""
    gc.collect()
    gc.freeze()
    ForkServer(int(sys.argv[1]), int(sys.argv[2]), tool).serve()


def _refuse_less_than_taken(memory: int) -> None:
    """Raise :class:`MemoryError` where this process has more address space than ``memory`` bytes already. Under such a
    limit not even the stack may grow: the process would be killed before it could say why."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    taken = pages * resource.getpagesize()
    if taken > memory:
        raise MemoryError(f"the tool has {taken} bytes of address space before it begins, of {memory} that it may have")


def _stand_in(said: int) -> None:
    """Redirect the streams of a fork: it reads nothing, and writes to the file of what is said."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, file in enumerate((nothing, nothing, said)):
        os.dup2(file, number)
    os.close(nothing)
    os.close(said)


def _tell(reply: socket.socket, returncode: int) -> None:
    # Whoever asked may be gone.
    try:
        reply.sendall(str(returncode).encode())
    except OSError:
        return
