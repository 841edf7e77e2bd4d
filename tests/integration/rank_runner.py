# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Starts two processes that train together, and sees to it that none outlives the test.

``python rank_runner.py MODULE...`` imports these modules, and forks two processes for each line of its standard input:
to import PyTorch and what it trains in parallel with takes longer than most of them train.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

RANKS = 2
# How long one goes on alone when the other has failed: what it waits for does not come.
GRACE_SECONDS = 30


@dataclass(frozen=True)
class Rank:
    """How a process ended, and what it wrote."""

    code: int
    text: str


class RankRunner:
    """Runs the functions ``main`` of modules that a process of its own has imported."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, module: str, arguments: Sequence[str], folder: Path, seconds: float = 600) -> list[Rank]:
        """Run ``main`` of ``module`` in two processes, with the arguments, a file to meet at and the process's number.

        Whatever runs after ``seconds``, or half a minute after the other failed, is killed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"module": module, "arguments": [*arguments], "folder": str(folder), "seconds": seconds}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        codes = json.loads(self._process.stdout.readline())
        return [Rank(code, _log(folder, number).read_text()) for number, code in enumerate(codes)]


@contextlib.contextmanager
def open_runner(*modules: str) -> Iterator[RankRunner]:
    """Start the process that imports ``modules``, which lie beside this file; it ends with the context."""
    command = [sys.executable, "-W", "ignore", __file__, *modules]
    # Programs import what is beside them, also where Python is told not to look there by itself.
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        yield RankRunner(process)


def _log(folder: Path, number: int) -> Path:
    return folder / f"rank{number}.log"


def _serve(modules: Sequence[str]) -> None:
    """Run two processes for each request, and answer with how they ended."""
    functions = {name: importlib.import_module(name).main for name in modules}
    # Nothing of it is garbage: no child walks through it.
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    for line in sys.stdin:
        request = json.loads(line)
        folder, function = Path(request["folder"]), functions[request["module"]]
        arguments = [*request["arguments"], str(folder / "store")]
        given = [(_log(folder, number), function, [*arguments, str(number)]) for number in range(RANKS)]
        processes = [context.Process(target=_become, args=arguments, daemon=True) for arguments in given]
        for process in processes:
            process.start()
        _wait(processes, request["seconds"])
        for process in processes:
            process.kill()
            process.join()
        print(json.dumps([process.exitcode for process in processes]), flush=True)


def _become(log: Path, function: Callable[..., None], arguments: Sequence[Any]) -> None:
    """Be one of the processes, which writes to its log alone."""
    with log.open("wb") as stream:
        os.dup2(stream.fileno(), sys.stdout.fileno())
        os.dup2(stream.fileno(), sys.stderr.fileno())
    function(*arguments)


def _wait(processes: Sequence[BaseProcess], seconds: float) -> None:
    """Wait for all to end, or for the time to be over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in processes]
        if None not in codes:
            return
        if any(codes):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)


if __name__ == "__main__":
    _serve(sys.argv[1:])
