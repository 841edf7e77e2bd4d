# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Which device a program runs on: what the caller asks for, held against what the file has code for."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from retrograd.contract.errors import RetrogradError

# The driver of IREE's for each kind of device that a target names (`cuda` of `cuda:sm_90`).
DRIVERS = {"cpu": "local-task", "cuda": "cuda", "vulkan": "vulkan", "hip": "hip"}


class PlacementError(RetrogradError, ValueError):
    """A device that a program has no code for; the message lists those it has."""


def choose_uri(targets: Sequence[str], device: str | torch.device | None = None) -> str:
    """IREE's URI of the device to run on.

    Args:
        targets: what the program was compiled for, such as ``("cpu", "cuda:sm_90")``.
        device: ``cpu``, ``cuda``, ``cuda:1``, ``vulkan``, ...: a kind, and which of several devices, from 0. Without
            it, the first of the targets.

    Raises:
        PlacementError: no such kind, or no code for it.
    """
    kinds = [target.partition(":")[0] for target in targets]
    asked = str(device) if device is not None else kinds[0]
    match = re.fullmatch(r"(\w+)(?::(\d+))?", asked)
    if match is None or match[1] not in kinds:
        raise PlacementError(
            f"no code for device '{asked}': compiled for {', '.join(targets)}; "
            f"choose one of {', '.join(kinds)}, or compile with target=... for it"
        )
    driver = DRIVERS[match[1]]
    if match[1] == "cpu":
        return driver
    if match[2] is None:
        # torch's current CUDA device is what `cuda` means to it.
        index = torch.cuda.current_device() if driver == "cuda" and torch.cuda.is_available() else 0
    else:
        index = int(match[2])
    return driver if index == 0 else f"{driver}://{index}"


def choose_device(targets: Sequence[str], places: Sequence[torch.device]) -> torch.device | None:
    """The first of the devices ``places`` that ``targets`` has code for; ``None`` if there is none."""
    kinds = {target.partition(":")[0] for target in targets}
    return next((place for place in places if place.type in kinds), None)
