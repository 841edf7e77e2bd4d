# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Leaves backwards to PyTorch's engine that take longer compiled, as measured in turn with it while a model trains.

Some of what is small takes longer compiled, whatever is compiled: to find what was compiled and to hand its tensors
over. So after `WARM_UP` compiled steps of a backward each second one runs in PyTorch's engine, and is timed as those
between are. It is left to PyTorch's engine where its times compiled rank above `MARGIN` times those there: by
`SURE` deviations of the rank-sum test (Mann and Whitney 1947), to which it does not matter how noise is distributed,
after `CHECKED` steps each or, in noise, more. After `FEWEST` each it stays compiled where they rank one below, and
after `MOST` in any case.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median
from time import perf_counter, thread_time
from typing import Any
from weakref import WeakSet

import torch

from retrograd.frontend.autograd.engine.engine_order import find_edge, name_of

WARM_UP = 20
FEWEST = 6
CHECKED = 16
MOST = 48
SURE = 3.0
MARGIN = 1.05
# How far into its graph it is looked at to tell backwards apart.
_HOPS = 4
_LEAF = "AccumulateGrad"
# Of how many kinds of backwards it is remembered how long they took.
MOST_PATHS = 1024


@dataclass(eq=False)
class Trial:
    """The times of one compiled backward, in seconds, and of the same in PyTorch's engine: pairs, but for the last
    compiled one. ``is_slow`` is the verdict; None before it."""

    compiled: list[float] = field(default_factory=list)
    eager: list[float] = field(default_factory=list)
    is_slow: bool | None = None
    steps: int = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a step is to run in PyTorch's engine, for the one before it."""
        return len(self.compiled) > len(self.eager)

    def add_compiled(self, seconds: float) -> None:
        """Add a compiled step."""
        self.steps += 1
        if self.steps > WARM_UP and self.is_slow is None and not self.is_waiting:
            self.compiled.append(seconds)

    def add_eager(self, seconds: float) -> None:
        """Add a step in PyTorch's engine, and judge."""
        if not self.is_waiting:
            return
        self.eager.append(seconds)
        # The first one ran in the engine for the first time since long.
        count = len(self.eager) - 1
        if count < FEWEST:
            return
        deviations = rank(self.compiled[1:], [MARGIN * seconds for seconds in self.eager[1:]])
        if count % CHECKED == 0 and deviations > SURE:
            self.is_slow = True
        elif deviations <= -1 or count >= MOST:
            self.is_slow = False

    def describe(self) -> str:
        """Why a backward is left to PyTorch's engine."""
        mine, theirs = median(self.compiled) * 1e6, median(self.eager) * 1e6
        return (
            f"compiled, it takes {mine:.0f} us, and there {theirs:.0f} (medians of {len(self.eager)} each, in turn); "
            "enable(only_if_faster=False) runs it compiled"
        )


def rank(these: Sequence[float], those: Sequence[float]) -> float:
    """The number of standard deviations by which these rank above as many others, if both are drawn alike."""
    count = len(these)
    above = sum(mine > other for mine in these for other in those)
    return (above - count**2 / 2) / sqrt(count**2 * (2 * count + 1) / 12)


class Trials:
    """All trials of an engine, by the backwards that they are of.

    A backward that is left is told by its first root and by what is behind it.
    """

    def __init__(self) -> None:
        # Of which roots the next backward is to be one that PyTorch's engine could run.
        self._held: set[Hashable] = set()
        self._left: set[Hashable] = set()
        self._trials: dict[Hashable, WeakSet[Trial]] = {}

    def is_left(self, roots: Sequence[Any]) -> bool:
        """Whether a backward is left to PyTorch's engine."""
        # What no backward can run from, PyTorch's engine refuses in its own words.
        return bool(self._left and roots and has_graph(roots[0])) and describe_path(roots) in self._left

    def takes_turn(self, kind: Hashable) -> bool:
        """Whether a backward of these roots may be one that is to run in PyTorch's engine now; asked once for each."""
        if kind not in self._held:
            return False
        self._held.discard(kind)
        return True

    def add_compiled(self, kind: Hashable, roots: Sequence[Any], trial: Trial, seconds: float) -> None:
        """Add a compiled step."""
        trial.add_compiled(seconds)
        if trial.steps == 1:
            self._alike(describe_path(roots)).add(trial)
        if trial.is_waiting:
            self._held.add(kind)

    def add_eager(self, roots: Sequence[Any], trial: Trial, seconds: float) -> str | None:
        """Add a step in PyTorch's engine; says why the backward is left to that, if it is from now on."""
        path = describe_path(roots)
        trial.add_eager(seconds)
        if not trial.is_slow or not all(other.is_slow for other in self._alike(path)):
            return None
        self._left.add(path)
        return trial.describe()

    def _alike(self, path: Hashable) -> WeakSet[Trial]:
        """The trials of backwards that are told apart by what is compiled alone."""
        if len(self._trials) >= MOST_PATHS:
            self._trials.clear()
            self._left.clear()
        return self._trials.setdefault(path, WeakSet())


def describe_path(roots: Sequence[Any]) -> Hashable:
    """Describe the first nodes of a backward, what the gradients of the last of them are like, and the leaf that is
    met, which is another one in another model. Asked at each step of what is left: of a leaf that is gone another may
    have the number."""
    root, path = roots[0], list[Hashable]()
    node: Any = getattr(root, "grad_fn", None) or find_edge(root).node
    for _ in range(_HOPS):
        path.append(name_of(node))
        following = None
        for other, _number in node.next_functions:
            if other is None:
                continue
            if type(other).__name__ == _LEAF:
                path.append(id(other.variable))
                following = None
                break
            following = following or other
        if following is None:
            break
        node = following
    return (*path, *[(tuple(like.shape), like.dtype) for like in node._input_metadata])


def has_graph(root: Any) -> bool:
    """Whether gradients flow from a root, a tensor or an edge."""
    return not isinstance(root, torch.Tensor) or root.requires_grad


def read_clock() -> float:
    """Seconds that have passed; of this thread alone where torch has no others, since then other programs do not
    count."""
    return thread_time() if torch.get_num_threads() == 1 else perf_counter()


def can_be_timed(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the time that a backward takes is known when it returns."""
    return all(tensor.device.type == "cpu" for tensor in tensors)
