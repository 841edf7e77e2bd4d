# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Keeps what was compiled of the backwards that ran, what runs eagerly and why, and what their sizes were."""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrograd.frontend.autograd.sizes.skeleton import Skeleton
from retrograd.frontend.autograd.sizes.structure import Sample
from retrograd.frontend.autograd.steps.recompile_reasons import Situation
from retrograd.frontend.autograd.steps.variants import CompiledStructure

# With how many of the compiled backwards a new one is compared, to say why it is new.
MOST_SITUATIONS = 64
# Of how many structures the sizes are remembered: of those that were met last.
MOST_STRUCTURES = 256


@dataclass(frozen=True)
class Recompile:
    """One compilation of a backward, or the decision to run it eagerly.

    ``reasons``: why nothing that was there served, or why it cannot be compiled. ``line`` is the line of code that ran
    the backward.
    """

    number: int
    outcome: str
    nodes: tuple[str, ...]
    reasons: tuple[str, ...]
    line: str = ""

    def __str__(self) -> str:
        named = ", ".join(self.nodes[:3]) + (", ..." if len(self.nodes) > 3 else "")
        where = f" of {len(self.nodes)} nodes ({named})" if self.nodes else ""
        line = f" at {self.line}" if self.line else ""
        return f"{self.number}: backward{line}{where} {self.outcome}: {'; '.join(self.reasons)}"


@dataclass
class History:
    """All that was compiled or refused, also written to a log."""

    log: logging.Logger
    entries: list[Recompile] = field(default_factory=list)
    # What was compiled, the last of it.
    situations: deque[Situation] = field(default_factory=lambda: deque(maxlen=MOST_SITUATIONS))
    _structures: OrderedDict[Hashable, CompiledStructure] = field(default_factory=OrderedDict)
    # By what structures have in common that differ in where their numbers come from: the last sample, and its skeleton.
    _last: OrderedDict[Hashable, tuple[Sample, Skeleton]] = field(default_factory=OrderedDict)

    def add(self, outcome: str, nodes: Sequence[str], reasons: Sequence[str]) -> None:
        """Add an entry."""
        # One cause is told once.
        told = tuple(dict.fromkeys(reasons))
        self.entries.append(Recompile(len(self.entries), outcome, tuple(nodes), told, find_line()))
        self.log.info("%s", self.entries[-1])

    def add_reason(self, reason: str) -> None:
        """Add a backward that was not captured; the same reason is told once."""
        if all(entry.reasons != (reason,) for entry in self.entries):
            self.add("runs eagerly", (), (reason,))

    def structure(self, key: Hashable) -> CompiledStructure:
        """Look up a structure; begins one if there is none."""
        found = self._structures.setdefault(key, CompiledStructure())
        self._structures.move_to_end(key)
        if len(self._structures) > MOST_STRUCTURES:
            self._structures.popitem(last=False)
        return found

    def exchange_last(self, key: Hashable, sample: Sample, skeleton: Skeleton) -> tuple[Sample, Skeleton] | None:
        """The last sample of any structure of this key, whose place this one takes."""
        before = self._last.pop(key, None)
        self._last[key] = (sample, skeleton)
        if len(self._last) > MOST_STRUCTURES:
            self._last.popitem(last=False)
        return before


def find_line() -> str:
    """The line of the user's code that is running: the innermost that is neither PyTorch's nor ours."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "retrograd.", "contextlib")):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
