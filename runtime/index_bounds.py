# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Indices among the arguments of a call: in range, or refused before compiled code reads what is not there."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class IndexCheck:
    """Elements of the tensor number ``argument`` are from ``least`` to ``most``, or ``exempt``; of those that
    ``slices`` leave, each of an axis, a start, an end and a step."""

    argument: int
    least: int
    most: int
    exempt: int | None = None
    slices: Sequence[Sequence[int]] = ()
    _passed: tuple[weakref.ref[torch.Tensor], int] | None = field(default=None, init=False, repr=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> IndexCheck:
        """Read one entry of a signature's ``indices``."""
        return cls(data["argument"], data["least"], data["most"], data["exempt"], data["slices"])

    def find_problem(self, tensor: torch.Tensor) -> str | None:
        """What is wrong with a tensor of indices; None if nothing is. One that passed is not looked at again until
        torch counts a write to it."""
        version = None if tensor.is_inference() else tensor._version
        passed = self._passed
        if passed is not None and passed[0]() is tensor and passed[1] == version:
            return None
        wrong = self._find_wrong(tensor.detach())
        if wrong is not None:
            besides = "" if self.exempt is None else f", or {self.exempt}"
            return f"the index {wrong} is out of range: from {self.least} to {self.most}{besides}"
        if version is not None:
            self._passed = (weakref.ref(tensor), version)
        return None

    def _find_wrong(self, values: torch.Tensor) -> int | None:
        for axis, start, end, step in self.slices:
            values = torch.ops.aten.slice.Tensor(values, axis, start, end, step)
        if not values.numel():
            return None
        if self.exempt is not None:
            values = values.masked_fill(values == self.exempt, self.most)
        # Both are read at once: on a GPU each reading waits for all that was asked of it before.
        low, high = torch.stack(torch.aminmax(values)).tolist()
        return int(high) if high > self.most else int(low) if low < self.least else None
