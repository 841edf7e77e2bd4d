# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tools of the toolchain, run as child processes that never outlive their parent's interest in them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ToolResult:
    """How a tool ended: ``returncode`` is negative where a signal ended it; ``stderr`` is what it said."""

    returncode: int
    stderr: str

    @property
    def crashed(self) -> str | None:
        """The name of the signal that ended the tool, if one did."""
        return signal.Signals(-self.returncode).name if self.returncode < 0 else None


def run_tool(command: Sequence[str | Path], *, folder: Path) -> ToolResult:
    """Run ``command`` in ``folder`` and wait for it.

    The child leads a process group of its own: on any exception here, Ctrl-C included, the whole group is killed.
    """
    with open(folder / "stderr.txt", "w+", encoding="utf-8", errors="replace") as stderr:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
            env=tool_environment(),
        )
        try:
            returncode = process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        stderr.seek(0)
        return ToolResult(returncode, stderr.read())


def tool_environment() -> dict[str, str]:
    """This process's environment, without what would change how a tool of the toolchain behaves."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONINSPECT", "PYTHONSTARTUP")}
