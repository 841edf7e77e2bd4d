# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Places in one piece of scratch memory, for what a function allocates and frees in the order in which it runs."""

from __future__ import annotations

ALIGNMENT = 256


class Pool:
    """Gives out places, each in the first gap that it fits; ``size`` is the bytes that all of them need."""

    def __init__(self) -> None:
        self.size = 0
        # What is in use, by offset, in bytes.
        self._taken: dict[int, int] = {}

    def allocate(self, size: int) -> int:
        """The offset of a place of that many bytes, aligned to ``ALIGNMENT``; nothing takes one unit of it too."""
        size = max(-(-size // ALIGNMENT), 1) * ALIGNMENT
        offset = 0
        for start, taken in sorted(self._taken.items()):
            if start - offset >= size:
                break
            offset = max(offset, start + taken)
        self._taken[offset] = size
        self.size = max(self.size, offset + size)
        return offset

    def free(self, offset: int) -> bool:
        """Take back the place at an offset; false where there is none."""
        return self._taken.pop(offset, None) is not None
