# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The error that a compilation ends in."""

from __future__ import annotations


class CompileError(RuntimeError):
    """A module could not be compiled.

    Attributes:
        phase: ``lower`` (torch to linalg) or ``iree-compile``.
        message: what the tool said first, with the op and its source line where known.
        log: all that it said.
        replay: a shell command that repeats the failure; empty where no tool failed.
    """

    def __init__(self, phase: str, message: str, log: str, replay: str) -> None:
        super().__init__(f"{phase}: {message}" + (f"\n  replay: {replay}" if replay else ""))
        self.phase = phase
        self.message = message
        self.log = log
        self.replay = replay
