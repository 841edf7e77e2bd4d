# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How a tensor of open sizes lies in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AxisOrder:
    """How the elements of a tensor lie, whatever its sizes: ``outer_to_inner`` are its axes by descending stride,
    ``expanded`` those of stride 0."""

    outer_to_inner: tuple[int, ...]
    expanded: frozenset[int]

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that lies so."""
        once = tensor[tuple(slice(1) if axis in self.expanded else slice(None) for axis in range(tensor.dim()))]
        inverse = [self.outer_to_inner.index(axis) for axis in range(tensor.dim())]
        copy = once.permute(self.outer_to_inner).contiguous().permute(inverse)
        return copy.expand(tensor.shape)
