# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Executables that tests share which may not share the compile cache."""

from __future__ import annotations

from typing import Any

from retrograd.pipelines.devices.targets import Target
from retrograd.pipelines.toolchain.executable import Executable, compile_executable

_EXECUTABLES: dict[tuple[str, Target], Executable] = {}


def compile_once(linalg: str, target: Target, **options: Any) -> Executable:
    """What iree-compile makes of a module, kept by the text that it is given.

    For tests that lower wrongly on purpose, or that look at which executables passed their first call or what is known
    of models: each has a cache folder of its own, and they compile the same text over and over.
    """
    if (linalg, target) not in _EXECUTABLES:
        _EXECUTABLES[linalg, target] = compile_executable(linalg, target, **options)
    return _EXECUTABLES[linalg, target]
