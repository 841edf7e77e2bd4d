# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Processes that examine cases: one that dies or takes too long is an outcome, not the end of the sweep.

On the CPU they are forked, since importing the databases takes longer than most cases. CUDA does not survive a fork,
and importing the databases is enough to start it: there each worker imports for itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Literal

import op_check
import torch
from op_cases import Case
from op_check import Verdict

StartMethod = Literal["fork", "spawn"]
# A worker is ended after so many tasks, with all the memory that they left behind.
TASKS = 40


class Worker:
    """A process that examines ``cases`` by their index, several as one program or one by itself."""

    def __init__(self, cases: Sequence[Case], samples: int | None, method: StartMethod) -> None:
        context = multiprocessing.get_context("fork") if method == "fork" else multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, cases, samples, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()
        self.task: Sequence[int] | None = None
        self._since = float("inf")
        self._given = 0
        self._up = self._ended = False

    @property
    def usable(self) -> bool:
        """Whether it can be given another task: it lives, and has not done its share."""
        return not self._ended and self._given < TASKS

    def is_late(self, timeout: float) -> bool:
        """Whether the task has taken longer than ``timeout`` seconds."""
        return self.task is not None and time.monotonic() - self._since > timeout

    def give(self, task: Sequence[int]) -> None:
        """Start on a task; its time counts from when the process is up."""
        self.task, self._given = task, self._given + 1
        if self._given > 1:
            self._since = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # it has ended, as the answer will say
            self._connection.send(task)

    def answer(self) -> list[Verdict] | str | None:
        """The verdicts on the task (none of several cases that are not all native), how the process ended, or None
        while there is neither.

        Raises:
            RuntimeError: it ended before it was up, as any other would.
        """
        try:
            if not self._connection.poll():
                return None
            received: list[Verdict] | None = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(10)
            code = self._process.exitcode or 0
            if not self._up:
                raise RuntimeError(f"a process of the sweep did not start: exit status {code}") from None
            return f"the process was ended by {signal.Signals(-code).name if code < 0 else f'exit status {code}'}"
        if received is None:
            self._up, self._since = True, time.monotonic()
        return received

    def stop(self) -> None:
        """End the process and the tools it runs: on an interrupt it ends these itself."""
        if self._ended:
            return
        self._ended = True
        if self._process.pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGINT)
        self._process.join(10)
        self._process.kill()
        self._process.join()
        self._connection.close()


def wait(workers: Sequence[Worker], seconds: float) -> None:
    """Until one of them has something to say, ``seconds`` at most."""
    multiprocessing.connection.wait([w._connection for w in workers], seconds)


def _work(connection: Connection, cases: Sequence[Case], samples: int | None, parent: int) -> None:
    """What the process does: None when it is up, then verdicts for each task."""
    warnings.simplefilter("ignore")
    # A sweep in the background of a shell ignores interrupts, and they are how a worker is stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    # Eager is the reference: in f32, not in what the tensor cores make of it (in matrix products that is the default).
    f32 = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError), f32:
        connection.send(None)
        while os.getppid() == parent:
            if connection.poll(5):
                connection.send(_examine([cases[i] for i in connection.recv()], samples))
    # Without what runs at exit: threads of a device that is gone can wait for ever there.
    os._exit(0)


def _examine(cases: Sequence[Case], samples: int | None) -> list[Verdict]:
    start = time.monotonic()
    if len(cases) == 1:
        verdicts = [op_check.examine(cases[0], samples)]
    else:
        verdicts = op_check.examine_together(cases, samples) or []
    for verdict in verdicts:
        verdict.seconds = round((time.monotonic() - start) / len(cases), 1)
    return verdicts
