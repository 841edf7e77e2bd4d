# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The place of our own files in a compiled program, which is a zip archive."""

from collections.abc import Iterable

OWN = "retrograd/"
"""The folder of it; IREE does not look at it."""

EPOCH = (1980, 1, 1, 0, 0, 0)
"""When its members were written, by what they say: the same bytes for the same program."""

_PART = f"{OWN}part"


def part_member(number: int) -> str:
    """The member that is another part of the program, of functions that were compiled beside the first part's."""
    return f"{_PART}{number}.vmfb"


def part_members(names: Iterable[str]) -> list[str]:
    """Those of an archive's members that are parts, in order."""
    count = sum(name.startswith(_PART) for name in names)
    return [part_member(number) for number in range(1, count + 1)]
