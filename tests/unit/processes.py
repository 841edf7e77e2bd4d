# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Processes that tests start and look after."""

import time
from collections.abc import Callable
from pathlib import Path

FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("numbers.part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename("numbers.part", "numbers")
time.sleep(600)
"""
"""Code of a child that starts a grandchild, writes both their numbers to a file and waits."""


def is_alive(number: int) -> bool:
    """Whether a process runs; one that ended and that nobody waited for does not."""
    try:
        status = Path(f"/proc/{number}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def read_numbers(folder: Path) -> list[int]:
    assert wait_for((folder / "numbers").exists)
    return [int(number) for number in (folder / "numbers").read_text(encoding="utf-8").split()]
