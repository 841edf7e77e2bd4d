# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The error that a compilation ends in."""

from __future__ import annotations

from retrograd.contract.errors import RetrogradError


class CompileError(RetrogradError, RuntimeError):
    """A module could not be compiled.

    Attributes:
        phase: ``lower`` (torch to linalg) or ``iree-compile``.
        message: what the tool said first, with the op and its source line where known.
        log: all that it said.
        replay: a shell command that repeats the failure; empty where no tool failed.
        remedy: what the user can do; empty where that is not known.
    """

    def __init__(self, phase: str, message: str, log: str, replay: str, remedy: str = "") -> None:
        lines = [
            f"{phase}: {message}",
            *([f"remedy: {remedy}"] if remedy else ()),
            *([f"replay: {replay}"] if replay else ()),
        ]
        super().__init__("\n  ".join(lines))
        self.phase = phase
        self.message = message
        self.log = log
        self.replay = replay
        self.remedy = remedy
