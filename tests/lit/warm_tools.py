# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs the tools of the lit tests in forks of one process that has them imported.

A RUN line does 50 ms of work, and the imports of `retrograd-opt` and `filecheck` take ten times as long. Each call has
a process of its own all the same: what it leaves behind, and how it ends, is its own affair.

`warm_tools.py serve SOCKET` forks on request until its standard input ends. `warm_tools.py SOCKET TOOL ARGUMENTS...`
asks it to run a tool, with the caller's folder and standard streams, and ends with the tool's exit status.
"""

from __future__ import annotations

# A caller is a program of its own, of which a run of all tests starts three hundred. It imports no more than this:
# `socket` and `json` take longer than the rest of its life.
import _socket
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

# Those that tests have ops of, less those that passes import themselves.
DIALECTS = ("arith", "builtin", "complex", "linalg", "math", "scf", "tensor", "torch")

_STREAMS = 3
_LONGEST_CALL = 1 << 20
# Between a folder and the words of a command: no word has one.
_BETWEEN = b"\0"
# What a shell says of a command that a signal ended: this and the signal's number.
_ENDED_BY_SIGNAL = 128


def serve(path: str) -> None:
    """Fork for each call that comes in by the socket at `path`."""
    import gc
    import select
    import signal
    import socket

    tools = load_tools()
    # What is imported stays: a child that looks for garbage would get a copy of all of it.
    gc.freeze()
    # The kernel takes the processes away that have answered.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    answer(connection, tools)
    os.unlink(path)
    os.rmdir(os.path.dirname(path))


def load_tools() -> dict[str, Callable[[], int | None]]:
    """The tools by name, with all passes and dialects: what `retrograd-opt` otherwise imports when it meets them, which
    took a third of its time."""
    from importlib import import_module

    from filecheck.main import main as filecheck

    from retrograd.pipelines.infra.registry import load_pass, registered_passes
    from retrograd.tools.opt import main as opt

    for name in registered_passes():
        load_pass(name)
    for name in DIALECTS:
        import_module(f"torch_mlir.dialects.{name}")
    return {"retrograd-opt": opt, "filecheck": filecheck}


def answer(connection: socket.socket, tools: dict[str, Callable[[], int | None]]) -> None:
    """Run what the caller asks for in a process of its own, tell it the exit status, and end."""
    import signal
    import socket

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, streams, _, _ = socket.recv_fds(connection, _LONGEST_CALL, _STREAMS)
    folder, *command = map(os.fsdecode, request.split(_BETWEEN))
    pid = os.fork()
    if pid == 0:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        # What Python opened at the start knows the server's streams: whether they can be positioned, say.
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        os.chdir(folder)
        sys.argv = command
        try:
            status = tools[command[0]]()
        except SystemExit as stopped:
            status = int(stopped.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
        # Without taking down what was imported, which takes as long as the work.
        os._exit(status or 0)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    connection.sendall(bytes([ended if ended >= 0 else _ENDED_BY_SIGNAL - ended]))
    os._exit(0)


def call(path: str, command: list[str]) -> int:
    """Have the server at `path` run `command`; returns its exit status."""
    request = _BETWEEN.join(map(os.fsencode, [os.getcwd(), *command]))
    streams = b"".join(stream.to_bytes(4, sys.byteorder) for stream in range(_STREAMS))
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(path)
    connection.sendmsg([request], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    return connection.recv(1)[0]


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(call(sys.argv[1], sys.argv[2:]))
