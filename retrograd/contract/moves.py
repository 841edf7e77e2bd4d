# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Move tensors between a device and its host: what a caller may ask of that which does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from retrograd.contract.device_rates import DeviceRates

# The type of tensors, which nothing here knows.
T = TypeVar("T")


class Transfer(Protocol):
    """Copies that were started together."""

    def finish(self) -> None:
        """Make what is queued from here on wait until the moves are done."""


class Mover(Protocol[T]):
    """Copies tensors between a device and its host, beside what computes."""

    def offload(self, tensors: Sequence[T]) -> tuple[list[T], Transfer]:
        """Begin to copy tensors to the host; they are not to be let go of or written to before that is finished."""

    def fetch(self, tensors: Sequence[T]) -> tuple[list[T], Transfer]:
        """Begin to copy tensors back from the host; what is on the device is given as it is."""

    def is_host(self, tensor: T) -> bool:
        """Whether a tensor is one that is on the host."""

    def is_free(self) -> bool:
        """Whether nobody records what is queued, who would record the copies too."""

    def measure(self) -> DeviceRates:
        """How fast the device and its link are, measured once, to two digits."""
