# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How much memory a program takes while it runs, measured by the allocator that it takes it from."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from retrograd.runtime.programs.devices import Device, open_device
from retrograd.runtime.programs.errors import ExecutionError
from retrograd.runtime.programs.executor import Program

# local-task serves scratch memory from a pool that its statistics leave out (all zeros). The same executable asks for
# the same memory in the same order on local-sync, whose allocator counts it.
_COUNTING_DRIVERS = {"local-task": "local-sync"}


@dataclass
class PeakMemory:
    """Bytes that a program allocated and held; tensors of the caller's, arguments and results among them, are not
    counted.

    `peak_bytes` is the most held at one time, `resident_bytes` what the program holds once loaded (constants that were
    copied to the device). Both are zero until the block ends.
    """

    peak_bytes: int = 0
    resident_bytes: int = 0


@contextlib.contextmanager
def track_peak(program: Program) -> Iterator[PeakMemory]:
    """Measure what IREE allocates for `program` during the block.

    A device's own high-water mark never falls, so the program runs in the block on a device opened for it alone. That
    loads it anew, and on CPU runs it on one thread: measure memory in the block, not time.

    Raises:
        DeviceError: no second device can be opened.
        ExecutionError: the driver's allocator keeps no statistics.
    """
    device = open_device(_counting_uri(program.driver))
    if not device.hal.allocator.has_statistics:
        raise ExecutionError(f"IREE's allocator for {device.uri!r} keeps no statistics; use a runtime built with them")
    measured = PeakMemory()
    with program.on_device(device):
        resident = _held_bytes(device)
        yield measured
        measured.resident_bytes = resident
        measured.peak_bytes = _peak_bytes(device)


@contextlib.contextmanager
def track_requests(device: torch.device) -> Iterator[PeakMemory]:
    """Measure the bytes that torch's allocator for a CUDA device is asked for during the block, as if none were given
    back: a launch plan asks once, for all that it works in.

    No counter of torch's is reset: its peaks are the user's.
    """
    measured = PeakMemory()
    before = _requested_bytes(device)
    yield measured
    measured.peak_bytes = _requested_bytes(device) - before


def _requested_bytes(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.allocated"])


def _counting_uri(uri: str) -> str:
    driver = uri.partition("://")[0]
    return _COUNTING_DRIVERS.get(driver, uri)


def _held_bytes(device: Device) -> int:
    counts = device.hal.allocator.statistics
    return int(
        counts["host_bytes_allocated"]
        + counts["device_bytes_allocated"]
        - counts["host_bytes_freed"]
        - counts["device_bytes_freed"]
    )


def _peak_bytes(device: Device) -> int:
    counts = device.hal.allocator.statistics
    return int(counts["host_bytes_peak"] + counts["device_bytes_peak"])
