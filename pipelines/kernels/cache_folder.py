# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds the folder in which kernels and their tiles are kept."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from retrograd.contract.environment import CACHE_FOLDER


def cache_folder() -> Path:
    """The folder of the compiler's cache, as the runtime has it: named by the environment, or the user's."""
    return Path(os.environ.get(CACHE_FOLDER) or platformdirs.user_cache_dir("retrograd"))
