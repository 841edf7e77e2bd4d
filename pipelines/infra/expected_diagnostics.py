# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``expected-error`` comments, as in mlir-opt: which diagnostics a text says it causes, and whether it does.

    // expected-error @below {{part of the message}}

The line is ``@above``, ``@below`` (the nearest line without such a comment), ``@+N``, ``@-N``, ``@unknown`` or, without
any, its own. ``expected-error-re`` has regular expressions in inner ``{{...}}``. Errors, warnings, notes and remarks go
alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from retrograd.pipelines.infra.diagnostics import Diagnostic

_COMMENT = re.compile(
    r"expected-(error|note|remark|warning)(-re)?\s*(?:@([+-]\d+|above|below|unknown))?\s*\{\{(.*?)\}\}\s*$"
)
_UNKNOWN_LINE = 0
# MLIR adds this to every error of an op's verifier.
_ADDED_NOTE = "see current operation"


@dataclass(frozen=True)
class ExpectedDiagnostic:
    """A diagnostic that must come: on `line` (from 1; 0 stands for unknown), with a match of `pattern` in it."""

    severity: str
    line: int
    pattern: str
    shown: str

    def matches(self, found: Diagnostic) -> bool:
        """Whether `found` is what was expected."""
        same_place = (found.severity, found.line) == (self.severity, self.line)
        return same_place and re.search(self.pattern, found.message) is not None


def find_expected(text: str) -> list[ExpectedDiagnostic]:
    """The expected diagnostics of a text, in order."""
    lines = text.splitlines()
    comments = [_COMMENT.search(line) for line in lines]
    expected = []
    for number, comment in enumerate(comments, start=1):
        if comment is None:
            continue
        severity, is_pattern, place, message = comment.groups()
        bare = [other for other, found in enumerate(comments, start=1) if found is None]
        match place:
            case "unknown":
                line = _UNKNOWN_LINE
            case "above":
                line = max((other for other in bare if other < number), default=_UNKNOWN_LINE)
            case "below":
                line = min((other for other in bare if other > number), default=len(lines) + 1)
            case _:
                line = number + int(place or 0)
        pattern = _join_pattern(message) if is_pattern else re.escape(message)
        expected.append(ExpectedDiagnostic(severity, line, pattern, message))
    return expected


def find_mismatches(expected: Sequence[ExpectedDiagnostic], found: Sequence[Diagnostic], file: str) -> list[Diagnostic]:
    """An error for each expected diagnostic that did not come, and for each that came and was not expected."""
    missing = list(expected)
    mismatches: list[Diagnostic] = []
    for diagnostic in found:
        match = next((one for one in missing if one.matches(diagnostic)), None)
        if match is not None:
            missing.remove(match)
        elif not (diagnostic.severity == "note" and diagnostic.message.startswith(_ADDED_NOTE)):
            message = f"unexpected {diagnostic.severity}: {diagnostic.message}"
            mismatches.append(Diagnostic("error", message, diagnostic.file, diagnostic.line, diagnostic.column))
    for one in missing:
        message = f'expected {one.severity} "{one.shown}" was not produced'
        mismatches.append(Diagnostic("error", message, file, one.line, 1))
    return mismatches


def _join_pattern(message: str) -> str:
    parts = re.split(r"\{\{(.*?)\}\}", message)
    return "".join(part if index % 2 else re.escape(part) for index, part in enumerate(parts))
