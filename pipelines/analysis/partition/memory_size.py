# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sizes of memory as people write them."""

from __future__ import annotations

import math
import re

from retrograd.contract.partitions import FREE

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]i?B|B)", re.IGNORECASE)
_EXPECTED = "give bytes (67108864, '64MiB') or a fraction of a peak (0.5)"


def parse_memory_size(size: object) -> int | float:
    """Bytes (int), or a fraction of something (float): from an int or ``"123"``, ``"64MiB"``, a float or ``"0.5"``.

    Raises:
        ValueError: none of these, or not above zero.
    """
    value: object = size
    if isinstance(size, str):
        value = _parse_text(size.strip())
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"unreadable memory budget {size!r}; {_EXPECTED}")
    if value <= 0:
        raise ValueError(f"memory budget {size!r} is not above zero; {_EXPECTED}")
    return value


def parse_budget(budget: object) -> int | float | None:
    """A memory budget as users give it, as `parse_memory_size`; None for ``free``: devices alone know how much that is.

    Raises:
        ValueError: as `parse_memory_size`.
    """
    if budget == FREE:
        return None
    try:
        return parse_memory_size(budget)
    except ValueError as error:
        raise ValueError(f"{error}, or '{FREE}' for what the device has left") from None


def resolve_memory_size(size: int | float, whole: int) -> int:
    """Bytes; a fraction (float) is of ``whole`` bytes."""
    return size if isinstance(size, int) else math.floor(size * whole)


def _parse_text(text: str) -> int | float | None:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if re.fullmatch(r"-?\d*\.\d+|-?\d+\.", text):
        return float(text)
    match = _SIZE.fullmatch(text)
    return None if match is None else math.floor(float(match[1]) * _UNITS[match[2].upper()])
