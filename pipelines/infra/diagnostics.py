# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""MLIR's diagnostics as plain data, and the error that a failed pipeline ends in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from retrograd.contract.errors import RetrogradError
from retrograd.dialects import ir

UNKNOWN_LOCATION = "unknown"
# MLIR's name for the file of text that was parsed from memory.
MEMORY = "-"


@dataclass(frozen=True)
class Diagnostic:
    """A message and what it is about; `line` and `column` count from 1, and 0 stands for unknown."""

    severity: str
    message: str
    file: str | None = None
    line: int = 0
    column: int = 0

    @property
    def location(self) -> str:
        """``file:line:column``; ``file`` alone for what is about all of it; or ``unknown``."""
        if self.line > 0:
            return f"{self.file}:{self.line}:{self.column}"
        return UNKNOWN_LOCATION if self.file in (None, MEMORY) else str(self.file)

    def __str__(self) -> str:
        return f"{self.location}: {self.severity}: {self.message}"


class PipelineError(RetrogradError, RuntimeError):
    """A pipeline that failed, or could not be started.

    Attributes:
        diagnostics: what was reported; each note follows what it belongs to.
        pass_name: the pass that failed, where that is known.
        replay: a shell command that repeats the failure, where the module could be kept.
    """

    def __init__(
        self, diagnostics: Iterable[Diagnostic], pass_name: str | None = None, replay: str | None = None
    ) -> None:
        self.diagnostics = tuple(diagnostics)
        self.pass_name = pass_name
        self.replay = replay
        lines = [f"pass {pass_name} failed" if pass_name else "the pass pipeline failed", *map(str, self.diagnostics)]
        super().__init__("\n".join(lines + ([f"replay: {replay}"] if replay else [])))


def read_diagnostics(error: ir.MLIRError, *, file: str | None = None) -> tuple[Diagnostic, ...]:
    """The diagnostics of an error, each followed by its notes. `file` is the name of what was parsed from memory. There
    is at least one: where MLIR said nothing, it says that."""
    found = tuple(diagnostic for one in error.error_diagnostics for diagnostic in flatten_diagnostic(one))
    # A dialect that is defined from Python has no custom syntax, and MLIR rejects it without a word.
    silent = Diagnostic(
        "error", 'MLIR reported nothing; write ops of the bwd dialect in generic form, "bwd.save"(%0) {...}', file
    )
    return name_file(found or (silent,), file)


def name_file(diagnostics: Iterable[Diagnostic], file: str | None) -> tuple[Diagnostic, ...]:
    """The diagnostics with `file` as the name of what was parsed from memory, and of what has no place."""
    return tuple(replace(d, file=file) if d.file in (None, MEMORY) and file is not None else d for d in diagnostics)


def flatten_diagnostic(diagnostic: Any) -> Iterator[Diagnostic]:
    """An MLIR ``Diagnostic`` or ``DiagnosticInfo``, then its notes."""
    file, line, column = find_position(diagnostic.location)
    severity = str(diagnostic.severity).rpartition(".")[2].lower()
    yield Diagnostic(severity, diagnostic.message, file, line, column)
    for note in diagnostic.notes:
        yield from flatten_diagnostic(note)


def find_position(location: ir.Location) -> tuple[str | None, int, int]:
    """File, line and column of a location, of the first that has them where one is made of others; else None, 0, 0. A
    module that is not written out, only its contents, is at 0:0 of its file."""
    for kind, parts in (
        (ir.NameLoc, lambda found: [found.child_loc]),
        (ir.CallSiteLoc, lambda found: [found.callee, found.caller]),
        (ir.FusedLoc, lambda found: found.locations),
    ):
        found = _cast(kind, location)
        if found is not None:
            positions = [find_position(part) for part in parts(found)]
            return next((position for position in positions if position[0] is not None), (None, 0, 0))
    place = _cast(ir.FileLineColLoc, location)
    return (None, 0, 0) if place is None else (place.filename, place.start_line, place.start_col)


def _cast(kind: Any, location: ir.Location) -> Any:
    try:
        return kind(location)
    except ValueError:
        return None
