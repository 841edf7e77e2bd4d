# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Indices among the arguments of a call: in range, or refused before compiled code reads what is not there."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from retrograd.contract.indices import IndexBound


@dataclass
class IndexCheck:
    """Looks at the elements of a tensor, which are to be within ``bound``."""

    bound: IndexBound
    _passed: tuple[weakref.ref[torch.Tensor], int] | None = field(default=None, init=False, repr=False)

    def find_problem(self, tensor: torch.Tensor) -> str | None:
        """Says what is wrong with a tensor of indices; None if nothing is. One that passed is not looked at again until
        torch counts a write to it."""
        version = None if tensor.is_inference() else tensor._version
        passed = self._passed
        if passed is not None and passed[0]() is tensor and passed[1] == version:
            return None
        wrong = self._find_wrong(tensor.detach())
        if wrong is not None:
            bound = self.bound
            besides = "" if bound.exempt is None else f", or {bound.exempt}"
            return f"the index {wrong} is out of range: from {bound.least} to {bound.most}{besides}"
        if version is not None:
            self._passed = (weakref.ref(tensor), version)
        return None

    def _find_wrong(self, values: torch.Tensor) -> int | None:
        bound = self.bound
        for axis, start, end, step in bound.slices:
            values = torch.ops.aten.slice.Tensor(values, axis, start, end, step)
        if not values.numel():
            return None
        if bound.exempt is not None:
            values = values.masked_fill(values == bound.exempt, bound.most)
        # Both are read at once: on a GPU each reading waits for all that was asked of it before.
        low, high = torch.stack(torch.aminmax(values)).tolist()
        return int(high) if high > bound.most else int(low) if low < bound.least else None
