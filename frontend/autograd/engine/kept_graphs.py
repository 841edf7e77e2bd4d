# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Has two backwards of one graph, which is kept for the second, give the same to the last bit: where the first was
recorded, which is a run of eager's, the others are run so too. PyTorch's engine adds up gradients in another order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from retrograd.frontend.autograd.engine.engine_order import find_edge

# Of how many graphs, the last, it is remembered that a backward of them was recorded.
MOST_GRAPHS = 16
# What nodes have that accumulate, of whatever graph.
_OF_LEAVES = 2**64 - 1


class KeptGraphs:
    """The graphs that a backward was recorded of and that were kept, known by the numbers of their first nodes.

    Whoever compares two backwards gives each a root of its own, a copy, so nodes behind the roots count too. Threads
    number nodes by themselves: a graph may be taken for another one, which is then run eagerly as well.
    """

    def __init__(self) -> None:
        self._numbers: deque[frozenset[int]] = deque(maxlen=MOST_GRAPHS)

    def add(self, roots: Sequence[Any]) -> None:
        """Remember a graph."""
        self._numbers.append(_first_numbers(roots))

    def has(self, roots: Sequence[Any]) -> bool:
        """Whether a backward from these roots runs through one of the graphs."""
        if not self._numbers:
            return False
        numbers = _first_numbers(roots)
        return any(not numbers.isdisjoint(others) for others in self._numbers)


def _first_numbers(roots: Sequence[Any]) -> frozenset[int]:
    nodes = [find_edge(root).node for root in roots]
    nodes += [following for node in nodes for following, _ in node.next_functions if following is not None]
    return frozenset([node._sequence_nr() for node in nodes]) - {_OF_LEAVES}
