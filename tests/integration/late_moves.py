# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Moves of residuals on a CPU, in the place of a CUDA device's: what is not waited for is not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import pytest
import torch
from torch import Tensor

from retrograd import built, options
from retrograd.contract.device_rates import DeviceRates
from retrograd.contract.moves import Transfer


@dataclass(eq=False)
class LateTransfer:
    """Copies that are made when they are waited for: what they read must be there until then."""

    mover: LateMover
    pairs: list[tuple[Tensor, Tensor]]

    def finish(self) -> None:
        for source, target in self.pairs:
            target.copy_(source)
        self.mover.under_way -= bool(self.pairs)
        self.pairs = []


@dataclass
class LateMover:
    """``hosts`` are the tensors on the host, by their addresses, ``log`` what was moved in which order, in bytes."""

    is_recorded: bool = False
    under_way: int = 0
    hosts: WeakValueDictionary[int, Tensor] = field(default_factory=WeakValueDictionary)
    log: list[tuple[str, int]] = field(default_factory=list)

    def offload(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Transfer]:
        made = [_garbage(tensor) for tensor in tensors]
        self.hosts.update((tensor.data_ptr(), tensor) for tensor in made)
        return made, self._start("out", tensors, made)

    def fetch(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Transfer]:
        made = [_garbage(tensor) if self.is_host(tensor) else tensor for tensor in tensors]
        moved = [(t, m) for t, m in zip(tensors, made, strict=True) if m is not t]
        return made, self._start("back", [t for t, _ in moved], [m for _, m in moved])

    def is_host(self, tensor: Tensor) -> bool:
        return tensor.data_ptr() in self.hosts

    def is_free(self) -> bool:
        return not self.is_recorded

    def measure(self) -> DeviceRates:
        return DeviceRates(out=25e9, back=20e9, memory=1e11, flops=1e11)

    def moved(self, way: str) -> int:
        """Bytes that went one way so far."""
        return sum(size for where, size in self.log if where == way)

    def _start(self, way: str, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> LateTransfer:
        self.log.append((way, sum(t.nbytes for t in sources)))
        self.under_way += bool(sources)
        return LateTransfer(self, list(zip(sources, targets, strict=True)))


def use_late_moves(patch: pytest.MonkeyPatch) -> LateMover:
    """Have programs for a CPU keep residuals elsewhere, moved by what this returns."""
    mover = LateMover()
    patch.setattr(options, "_OFFLOADING", (("cpu",), ("cuda",)))
    patch.setattr(built, "mover_of", lambda _device: mover)
    return mover


def _garbage(like: Tensor) -> Tensor:
    made = torch.empty_like(like)
    made.view(-1).view(torch.uint8).fill_(0xFF)
    return made
