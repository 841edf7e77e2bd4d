# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Starts two processes that train together, and sees to it that none outlives the test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RANKS = 2
# How long one goes on alone when the other has failed: what it waits for does not come.
GRACE_SECONDS = 30


@dataclass(frozen=True)
class Rank:
    """How a process ended, and what it wrote."""

    code: int
    text: str


def run_ranks(script: Path, arguments: Sequence[str], folder: Path, seconds: float = 600) -> list[Rank]:
    """Run ``script`` in two processes, with the arguments, a file to meet at and the number of the process.

    Whatever runs after ``seconds``, or half a minute after the other failed, is killed.
    """
    store, logs = folder / "store", [folder / f"rank{number}.log" for number in range(RANKS)]
    command = [sys.executable, "-W", "ignore", str(script), *arguments, str(store)]
    # Programs import what is beside them, also where Python is told not to look there by itself.
    paths = [str(script.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, log in enumerate(logs):
            with log.open("wb") as stream:
                processes.append(
                    subprocess.Popen([*command, str(number)], stdout=stream, stderr=subprocess.STDOUT, env=environment)
                )
        _wait(processes, seconds)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [Rank(process.returncode, log.read_text()) for process, log in zip(processes, logs, strict=True)]


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait for all to end, or for the time to be over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return
        if any(codes):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)
