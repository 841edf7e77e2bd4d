# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Modes that are open at a backward and were not at its forward: they see none of its ops, which a warning says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from retrograd.frontend.python.user_lines import warn_user


class UnseenOpsWarning(UserWarning):
    """A mode that is to see each op is open while a compiled backward runs."""


def telling_modes(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, and a warning where a mode of the user's is open that it shows nothing to."""

    def run(*arguments: Any) -> Any:
        if torch._C._len_torch_dispatch_stack():
            _tell()
        return call(*arguments)

    return run


def _tell() -> None:
    modes = [mode for mode in _get_current_dispatch_mode_stack() if not mode.is_infra_mode()]
    # PyTorch opens some of its own around compiled code.
    kinds = [type(mode) for mode in modes if not type(mode).__module__.startswith(("torch._", "retrograd."))]
    if kinds:
        names = ", ".join(kind.__name__ for kind in kinds)
        warn_user(
            f"{names} is open at backward(), and was not when the forward was called, which is compiled: it sees no op "
            "of either; to have it see them, call the model itself, both forward and backward",
            UnseenOpsWarning,
        )
