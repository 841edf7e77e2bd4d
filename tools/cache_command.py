# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``retrograd cache``: the folder of executables that need not be compiled again."""

from __future__ import annotations

import argparse

from retrograd.runtime.cache import Cache
from retrograd.runtime.reports.report import format_bytes


def execute(arguments: argparse.Namespace) -> int:
    """Print where the cache is and how much it holds, or empty it."""
    cache = Cache()
    if arguments.action == "clear":
        size = cache.size()
        print(f"removed {cache.clear()} entries, {format_bytes(size)}, from {cache.folder}")
        return 0
    print(f"folder:  {cache.folder}")
    print(f"entries: {len(cache.entries())}")
    print(f"size:    {format_bytes(cache.size())} of at most {format_bytes(cache.max_bytes)}")
    return 0
