# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads and sets the states of torch's random number generators, for runs that are to draw the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# By device; of the CPU's by None.
RandomStates = dict[torch.device | None, Tensor]


def random_states(tensors: Sequence[Any]) -> RandomStates:
    """The states of torch's random number generators: the CPU's, and those of devices that tensors are on."""
    devices = {t.device for t in tensors if isinstance(t, Tensor) and t.is_cuda}
    return {None: torch.get_rng_state(), **{device: torch.cuda.get_rng_state(device) for device in devices}}


def set_random_states(states: RandomStates) -> None:
    """Give torch's random number generators states that they had."""
    for device, state in states.items():
        if device is None:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)
