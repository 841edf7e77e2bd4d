# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How fast a device copies and computes, as it was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceRates:
    """Bytes a second to the host (``out``), ``back`` from it, and of the device's own ``memory``; ``flops`` a second of
    products of float32."""

    out: float
    back: float
    memory: float
    flops: float

    def move_seconds(self, size: int) -> float:
        """Seconds to move so many bytes to the host and back."""
        return size / self.out + size / self.back


ASSUMED_RATES = DeviceRates(out=2e10, back=2e10, memory=2e12, flops=5e13)
"""Of a device that is not here: one of a data center, on PCIe of 16 lanes."""
