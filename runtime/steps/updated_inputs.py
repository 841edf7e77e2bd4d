# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes several updated inputs of a plan with one call: the statistics of 53 batch norms are 159 tensors, each of
which takes the host 7 us by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Updates:
    """Copies to inputs, each from a value that a step gave, in order."""

    targets: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)

    def takes(self, target: int, source: int, arguments: int) -> bool:
        """Whether a copy may be made together with those so far: it is of no argument, which one of these could be,
        and to an input that none of these is of or to."""
        return source >= arguments and target not in (*self.targets, *self.sources)

    def add(self, target: int, source: int, freed: Sequence[int]) -> None:
        """Add a copy, with the values that are of no use after it."""
        self.targets.append(target)
        self.sources.append(source)
        self.freed.extend(freed)

    def action(self) -> Callable[[list[Any], Any], None]:
        """Make a function that copies, and then lets go of what is freed."""
        groups: list[tuple[list[int], list[int]]] = []
        targets, sources, freed = self.targets, self.sources, self.freed

        def run(values: list[Any], _python: Any) -> None:
            if len(targets) == 1:
                values[targets[0]].copy_(values[sources[0]])
            else:
                # Types are the same at each call.
                for some, given in groups or _group(groups, targets, sources, values):
                    torch._foreach_copy_([values[place] for place in some], [values[place] for place in given])
            for place in freed:
                values[place] = None

        return run


def _group(
    groups: list[tuple[list[int], list[int]]], targets: Sequence[int], sources: Sequence[int], values: Sequence[Any]
) -> list[tuple[list[int], list[int]]]:
    """Fill ``groups`` with the copies between tensors of the same types and devices, which one kernel makes."""
    found: dict[Any, tuple[list[int], list[int]]] = {}
    for target, source in zip(targets, sources, strict=True):
        to, given = values[target], values[source]
        some, many = found.setdefault((to.dtype, to.device, given.dtype, given.device), ([], []))
        some.append(target)
        many.append(source)
    groups.extend(found.values())
    return groups
