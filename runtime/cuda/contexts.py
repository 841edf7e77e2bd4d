# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The CUDA device that a thread works on, for torch and for what calls CUDA's driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from retrograd.runtime.cuda.driver import Driver, open_driver


@contextlib.contextmanager
def entered(device: torch.device, driver: Driver | None = None) -> Iterator[None]:
    """Make a CUDA device the calling thread's during the block: for torch, and for ``driver``, by default the
    machine's, which works in its context.

    torch's own guard is not enough: where the device is the current one by number it calls nothing, and a thread in
    which CUDA's runtime was not called yet has no context.

    Raises:
        ExecutionError: the driver has no such device.
    """
    with torch.cuda.device(device):
        driver = driver or open_driver()
        if driver is not None:
            driver.enter(torch.cuda.current_device() if device.index is None else device.index)
        yield
