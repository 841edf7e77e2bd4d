# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Keeps what was compiled of the backwards that ran, what runs eagerly and why, and what their sizes were."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from retrograd.frontend.autograd.sizes.skeleton import Skeleton
from retrograd.frontend.autograd.sizes.structure import Sample
from retrograd.frontend.autograd.steps.recompile_reasons import Situation
from retrograd.frontend.autograd.steps.variants import CompiledStructure, Variant
from retrograd.frontend.python.user_lines import find_user_line

# With how many of the compiled backwards a new one is compared, to say why it is new.
MOST_SITUATIONS = 64
# With what PyTorch begins the frames of its C++ code, in errors of it.
_BACKTRACE = "\nException raised from "
# Of how many structures the sizes are remembered: of those that were met last.
MOST_STRUCTURES = 256
# Of how many graphs compiled at one line it is asked whether they ran again.
MOST_GRAPHS = 8
CHURN = (
    "of the backwards that were compiled last at this line one at most ran again, as where a model goes by what its "
    "tensors hold; one that is new there is compiled once it comes again"
)


@dataclass(frozen=True, repr=False)
class Recompile:
    """One compilation of a backward, or the decision to run it eagerly. ``reasons``: why nothing that was there served,
    or why it cannot be compiled. ``line`` is the line of code that ran the backward."""

    number: int
    outcome: str
    nodes: tuple[str, ...]
    reasons: tuple[str, ...]
    line: str = ""

    def __str__(self) -> str:
        where = f"{self.line}: " if self.line else ""
        nodes = f" of {len(self.nodes)} nodes" if self.nodes else ""
        return f"{where}a backward{nodes} {self.outcome}: {'; '.join(self.reasons)}"

    # A list of them is read as it is printed, and a backward has hundreds of nodes.
    __repr__ = __str__


class Recompiles(list[Recompile]):
    """Entries in order; they print as one line each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    __repr__ = __str__


@dataclass
class Runs:
    """How often what was compiled of a capture has run."""

    count: int = 0


@dataclass
class History:
    """All that was compiled or refused, also written to a log."""

    log: logging.Logger
    entries: list[Recompile] = field(default_factory=list)
    # What was compiled, the last of it.
    situations: deque[Situation] = field(default_factory=lambda: deque(maxlen=MOST_SITUATIONS))
    # What was told of backwards that were not captured.
    _told: set[tuple[str, str, str, int]] = field(default_factory=set)
    _structures: OrderedDict[Hashable, CompiledStructure] = field(default_factory=OrderedDict)
    # By what structures have in common that differ in where their numbers come from: the last sample, and its skeleton.
    _last: OrderedDict[Hashable, tuple[Sample, Skeleton]] = field(default_factory=OrderedDict)
    # The captures that were compiled last at each line.
    _graphs: dict[str, deque[Runs]] = field(default_factory=dict)

    def add(self, outcome: str, nodes: Sequence[str], reasons: Sequence[str]) -> None:
        """Add an entry."""
        # One cause is told once, in one line.
        told = tuple(dict.fromkeys(_in_one_line(reason.partition(_BACKTRACE)[0]) for reason in reasons))
        self.entries.append(Recompile(len(self.entries), outcome, tuple(nodes), told, find_user_line()))
        self.log.info("%s", self.entries[-1])

    def add_reason(self, outcome: str, reason: str, nodes: Sequence[str] = ()) -> None:
        """Add a backward that was not captured, or cannot be compiled; the same reason is told once for each line that
        runs one, whatever its sizes are."""
        key = (outcome, reason, find_user_line(), len(nodes))
        if key not in self._told:
            self._told.add(key)
            self.add(outcome, nodes, (reason,))

    def structure(self, key: Hashable) -> CompiledStructure:
        """Look up a structure; begins one if there is none."""
        found = self._structures.setdefault(key, CompiledStructure())
        self._structures.move_to_end(key)
        if len(self._structures) > MOST_STRUCTURES:
            self._structures.popitem(last=False)
        return found

    def note_graph(self, runs: Runs) -> None:
        """Count a capture that is compiled at the line that runs."""
        self._graphs.setdefault(find_user_line(), deque(maxlen=MOST_GRAPHS)).append(runs)

    def is_churning(self) -> bool:
        """Whether of what was compiled last at the line that runs one graph at most ran again."""
        graphs = self._graphs.get(find_user_line(), ())
        return len(graphs) == MOST_GRAPHS and sum(runs.count > 0 for runs in graphs) <= 1

    def drop(self, variant: Variant) -> None:
        """Stop using a variant."""
        variant.is_gone = True
        if (structure := variant.structure) is not None:
            structure.variants = [other for other in structure.variants if other is not variant]
            # What its calls gave is no longer what they give.
            structure.samples.clear()
            self._last.clear()

    def exchange_last(self, key: Hashable, sample: Sample, skeleton: Skeleton) -> tuple[Sample, Skeleton] | None:
        """The last sample of any structure of this key, whose place this one takes."""
        before = self._last.pop(key, None)
        self._last[key] = (sample, skeleton)
        if len(self._last) > MOST_STRUCTURES:
            self._last.popitem(last=False)
        return before


def _in_one_line(text: str) -> str:
    """The same, with a remedy set off as in a sentence."""
    parts = [" ".join(part.split()) for part in text.split("\n  remedy: ")]
    return "; remedy: ".join(parts)
