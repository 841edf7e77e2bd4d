# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Defines the key by which what was compiled is found: that in which the steps of one capture may differ."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol

import torch

from retrograd.frontend.autograd.hooks.hook_inlining import SiteKey
from retrograd.frontend.autograd.steps.shared_memory import Shared


class StepOptions(Hashable, Protocol):
    """The options of the scope that a backward is in: compared, and handed on to what builds."""

    @property
    def background(self) -> bool:
        """Whether it is compiled beside the training."""


class StepKey(NamedTuple):
    """One step: the options, PyTorch's sizes, the scalars that are computed with, what each input is like (shape,
    dtype, device, whether it requires grad), the hooks that are to be inlined, and which inputs share memory.

    A tuple, which Python hashes and compares fastest: one is made at each step that the guard does not let through.
    """

    options: StepOptions
    sizes: tuple[int, ...]
    scalars: tuple[float, ...]
    like: tuple[tuple[torch.Size, torch.dtype, torch.device, bool], ...]
    inlined: SiteKey
    shared: Shared = ()
