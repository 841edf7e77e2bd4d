# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Whether a step is like the one before, told without looking up anything."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

from retrograd.frontend.autograd.steps.shared_memory import MergedGuard


class StepGuard:
    """Holds for steps with these options, inlined hooks, sizes and numbers, and tensors of the same types and shapes,
    whatever their strides, but those of tensors that are ``merged``.

    The tensors are compared by the C++ code of Dynamo's guards, a tenth of a microsecond each. It may not hold where it
    could (of a tensor that is given twice, but was not before, say): then the step is looked up.
    """

    __slots__ = (
        "_count",
        "_first",
        "_inlined",
        "_lying",
        "_merged",
        "_options",
        "_scalars",
        "_sizes",
        "_tensors",
        "_twins",
    )

    def __init__(
        self,
        options: Hashable,
        inlined: Hashable,
        inputs: Sequence[torch.Tensor],
        sizes: Sequence[int],
        scalars: Sequence[float],
        merged: MergedGuard | None = None,
    ) -> None:
        self._options, self._inlined, self._count = options, inlined, len(inputs)
        self._sizes, self._scalars, self._merged = list(sizes), list(scalars), merged
        # Dynamo's guards never hold for a tensor that is given twice, as layers that share parameters do.
        place = {id(tensor): number for number, tensor in reversed([*enumerate(inputs)])}
        self._twins = [(n, place[id(t)]) for n, t in enumerate(inputs) if place[id(t)] != n]
        self._first = sorted(place.values())
        self._tensors = self._compare_with(inputs, () if merged is None else merged.numbers)
        # The same, and that tensors lie as they did.
        self._lying: TensorGuards | None = None

    def _compare_with(self, inputs: Sequence[torch.Tensor], lying: Collection[int]) -> TensorGuards:
        """Makes a guard of tensors like these; those with the numbers in ``lying`` have the same strides."""
        once = [inputs[number] for number in self._first]
        # PyTorch declares one list for both, where it takes one for each tensor.
        shapes: Any = [list(tensor.shape) for tensor in once]
        fixed = {id(inputs[number]) for number in lying}
        strides: Any = [[*t.stride()] if id(t) in fixed else [None] * t.dim() for t in once]
        with torch.enable_grad():
            return TensorGuards(*once, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)

    def look_at_strides(self, inputs: Sequence[torch.Tensor], lying: Collection[int]) -> None:
        """Know from now on whether the tensors with these numbers lie as these do, too."""
        self._lying = self._compare_with(inputs, lying if self._merged is None else {*lying, *self._merged.numbers})

    def holds(
        self,
        options: Hashable,
        inlined: Hashable,
        inputs: Sequence[torch.Tensor],
        sizes: Sequence[int],
        scalars: Sequence[float],
        lying: bool = False,
    ) -> bool:
        """Whether a step is such a one, in which no gradients of gradients are computed; with ``lying``, also whether
        the tensors that it was told to look at lie as they did."""
        if not (options is self._options or options == self._options):
            return False
        if len(inputs) != self._count or torch.is_grad_enabled():
            return False
        if list(sizes) != self._sizes or list(scalars) != self._scalars or inlined != self._inlined:
            return False
        if self._merged is not None and not self._merged.holds(inputs):
            return False
        if self._twins:
            if any(inputs[number] is not inputs[first] for number, first in self._twins):
                return False
            inputs = [inputs[number] for number in self._first]
        # Whether a tensor requires grad is compared only while that matters.
        torch._C._set_grad_enabled(True)
        try:
            guard = self._lying if lying else self._tensors
            return guard is not None and guard.check(*inputs)
        finally:
            torch._C._set_grad_enabled(False)
