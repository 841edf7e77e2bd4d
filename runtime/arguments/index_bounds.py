# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Indices among the arguments of a call: in range, or refused before compiled code reads what is not there.

On a GPU to read a number is to wait for all that was asked of the device before. There the first tensor alone is looked
at before the call; of those of later calls the next call says what was wrong, and until then compiled code gives NaN in
the place of what is not there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from retrograd.contract.indices import IndexBound

# Answers that are waited for at the most: a host that is further ahead than so many calls waits for the first of them.
_MOST_AWAITED = 8

Extremes = Callable[[bool], "tuple[int, int] | None"]
"""Gives the least and the greatest of some numbers; None while they are not known, unless it is told to wait."""


def ask_device(extremes: torch.Tensor) -> Extremes | None:
    """Have two numbers brought from a CUDA device, without waiting for them; None where nobody has to wait."""
    if not extremes.is_cuda:
        return None
    found = torch.empty(extremes.shape, dtype=extremes.dtype, device="cpu", pin_memory=True)
    found.copy_(extremes, non_blocking=True)
    brought = torch.cuda.Event()
    brought.record(torch.cuda.current_stream(extremes.device))

    def read(wait: bool) -> tuple[int, int] | None:
        if wait:
            brought.synchronize()
        elif not brought.query():
            return None
        low, high = found.tolist()
        return low, high

    return read


@dataclass
class IndexCheck:
    """Looks at the elements of a tensor, which are to be within ``bound``. ``ask`` brings numbers from a device, or
    says by None that they are at hand."""

    bound: IndexBound
    ask: Callable[[torch.Tensor], Extremes | None] = field(default=ask_device, repr=False)
    _passed: tuple[weakref.ref[torch.Tensor], int] | None = field(default=None, init=False, repr=False)
    _has_looked: bool = field(default=False, init=False, repr=False)
    _awaited: deque[Extremes] = field(default_factory=deque, init=False, repr=False)

    def find_problem(self, tensor: torch.Tensor) -> str | None:
        """Says what is wrong with a tensor of indices, or on a GPU with one of an earlier call; None if nothing is. One
        that passed is not looked at again until torch counts a write to it."""
        if (wrong := self._find_awaited()) is not None:
            self._passed = None
            return f"{self._describe(wrong)}, in an earlier call, which gave NaN for what it leads to"
        version = None if tensor.is_inference() else tensor._version
        passed = self._passed
        if passed is not None and passed[0]() is tensor and passed[1] == version:
            return None
        extremes = self._find_extremes(tensor.detach())
        if extremes is not None:
            if self._has_looked and (asked := self.ask(extremes)) is not None:
                self._awaited.append(asked)
            elif (wrong := self._find_wrong(*extremes.tolist())) is not None:
                return self._describe(wrong)
            self._has_looked = True
        if version is not None:
            self._passed = (weakref.ref(tensor), version)
        return None

    def _find_awaited(self) -> int | None:
        """An index out of range among those of earlier calls that are known by now."""
        while True:
            wait = len(self._awaited) > _MOST_AWAITED
            try:
                read = self._awaited.popleft()
            except IndexError:
                return None
            if (extremes := read(wait)) is None:
                self._awaited.appendleft(read)
                return None
            if (wrong := self._find_wrong(*extremes)) is not None:
                return wrong

    def _find_extremes(self, values: torch.Tensor) -> torch.Tensor | None:
        """The least and the greatest index, where there are any that can be looked at: while a graph is captured, what
        it will be run for is not known."""
        bound = self.bound
        for axis, start, end, step in bound.slices:
            values = torch.ops.aten.slice.Tensor(values, axis, start, end, step)
        if not values.numel() or (values.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        if bound.exempt is not None:
            values = values.masked_fill(values == bound.exempt, bound.most)
        # Both are read at once.
        return torch.stack(torch.aminmax(values))

    def _find_wrong(self, low: int, high: int) -> int | None:
        return int(high) if high > self.bound.most else int(low) if low < self.bound.least else None

    def _describe(self, wrong: int) -> str:
        bound = self.bound
        besides = "" if bound.exempt is None else f", or {bound.exempt}"
        return f"the index {wrong} is out of range: from {bound.least} to {bound.most}{besides}"
