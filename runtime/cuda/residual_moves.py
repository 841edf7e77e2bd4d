# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Moves residuals to pinned memory of the host and back, on a stream of its own beside the one that computes.

Memory of the device is taken and given back in the order of the stream that computes, which waits for a copy before
anything else may use what that reads or writes: what the device holds does not depend on how fast the link is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from retrograd.contract.device_rates import DeviceRates
from retrograd.contract.moves import Mover, Transfer

# Bytes that are copied to measure the link, rows of the matrices that are multiplied, and how often.
_PROBE_BYTES, _PROBE_ROWS, _PROBES = 1 << 26, 2048, 3


@dataclass(eq=False)
class CudaTransfer:
    """Copies up to an event on the stream that they are on; keeps what they read and write."""

    done: torch.cuda.Event
    device: torch.device
    held: Sequence[Tensor]

    def finish(self) -> None:
        """As :class:`Transfer`."""
        torch.cuda.current_stream(self.device).wait_event(self.done)
        self.held = ()


class CudaMover:
    """Moves tensors of one CUDA device. Pinned memory is of torch's own allocator, which keeps what is given back until
    the copies of it are done. The stream is made at the first move. Safe in several threads: copies are in the order in
    which they were started."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: torch.cuda.Stream | None = None
        self._lock = threading.Lock()
        self._measured: DeviceRates | None = None

    def offload(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Transfer]:
        """As :class:`Mover`."""
        hosts = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
        return hosts, self._copy(tensors, hosts)

    def fetch(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Transfer]:
        """As :class:`Mover`. Memory for them is of the stream that computes, and may be what other work there has
        given up that is still queued: the copies are behind it."""
        given = [torch.empty_like(t, device=self._device) if self.is_host(t) else t for t in tensors]
        moved = [(t, g) for t, g in zip(tensors, given, strict=True) if g is not t]
        return given, self._copy([t for t, _ in moved], [g for _, g in moved])

    def is_host(self, tensor: Tensor) -> bool:
        """As :class:`Mover`."""
        return tensor.device.type == "cpu"

    def is_free(self) -> bool:
        """As :class:`Mover`."""
        return not torch.cuda.is_current_stream_capturing()

    def measure(self) -> DeviceRates:
        """As :class:`Mover`."""
        with self._lock:
            if self._measured is None:
                self._measured = self._measure()
            return self._measured

    def _copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> CudaTransfer:
        stream = self._stream()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            done = stream.record_event()
        return CudaTransfer(done, self._device, [*sources, *targets])

    def _stream(self) -> torch.cuda.Stream:
        if self._made is None:
            with self._lock:
                self._made = self._made or torch.cuda.Stream(self._device)
        return self._made

    def _measure(self) -> DeviceRates:
        on_device, other = (torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2))
        on_host = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        matrix, product = (torch.zeros(_PROBE_ROWS, _PROBE_ROWS, device=self._device) for _ in range(2))
        return DeviceRates(
            out=self._rate(_PROBE_BYTES, lambda: on_host.copy_(on_device, non_blocking=True)),
            back=self._rate(_PROBE_BYTES, lambda: on_device.copy_(on_host, non_blocking=True)),
            # Read and written.
            memory=self._rate(2 * _PROBE_BYTES, lambda: other.copy_(on_device)),
            flops=self._rate(2 * _PROBE_ROWS**3, lambda: torch.mm(matrix, matrix, out=product)),
        )

    def _rate(self, amount: int, work: Callable[[], object]) -> float:
        """How much of an ``amount`` of ``work`` is done in a second, at its fastest."""
        seconds = []
        with torch.cuda.device(self._device), torch.no_grad():
            for _ in range(_PROBES):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                work()
                end.record()
                end.synchronize()
                seconds.append(start.elapsed_time(end) / 1e3)
        # What is decided by it is not to differ for a thousandth.
        return float(f"{amount / max(min(seconds), 1e-9):.1e}")


@cache
def mover_of(device: torch.device) -> Mover[Tensor]:
    """The one mover of a CUDA device."""
    return CudaMover(device)
