# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Finds which operands a kernel of pointwise ops leaves to others, since it has room for so many only.

As in the sum of the nine taps of a depthwise convolution: five products are computed inside of the kernel that adds up,
four are written to memory before it.
Source: ``kIreeMaxOperandCount`` of IREE's ``DispatchCreation/FusionUtils.h``, and the order in which its elementwise
fusion meets ops, which sums of 5 to 48 terms show.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

# A kernel takes fewer operands than this. Two views of a buffer are two operands; so is what is written to, and what a
# sum starts at.
_LIMIT = 16
ROOM_OF_POINTWISE, ROOM_OF_REDUCTION = _LIMIT - 2, _LIMIT - 3


def find_surplus(
    operands: Sequence[int], room: int, inside: Mapping[int, Sequence[int]], shared: Container[int]
) -> list[int]:
    """Find the values that a kernel of an op on ``operands`` reads from memory, though it could compute them inside had
    it room for more than ``room`` operands.

    Args:
        operands: values that the op takes.
        room: the most operands that the kernel has.
        inside: of the values that can be computed inside of the kernel the operands of their ops.
        shared: those of them that more than one op takes.
    """
    kernel = _Kernel(room, inside, shared, [])
    kernel = kernel.replace([], operands, [])
    while (larger := kernel.take_next()) is not None:
        kernel = larger
    return [value for value in kernel.operands if value in inside]


@dataclass(frozen=True)
class _Kernel:
    """A kernel that computes ``taken`` of the values of ``inside``, and has ``operands``."""

    room: int
    inside: Mapping[int, Sequence[int]]
    shared: Container[int]
    operands: Sequence[int]
    taken: frozenset[int] = frozenset()

    def take_next(self) -> _Kernel | None:
        """With one more op taken in, and with it those that feed it: of a long sum two additions and one of the terms
        at a time, until there is no room, and then single terms. First what adds no operands; ``None`` if nothing fits.
        """
        fitting: _Kernel | None = None
        for place, value in enumerate(self.operands):
            if value not in self.inside:
                continue
            before, behind = self.operands[:place], self.operands[place + 1 :]
            larger = self.replace(before, self.inside[value], behind, value)
            if len(larger.operands) <= len(self.operands):
                return larger
            if fitting is None and len(larger.operands) <= self.room:
                fitting = larger
        return fitting

    def replace(
        self, before: Sequence[int], values: Sequence[int], behind: Sequence[int], taken: int | None = None
    ) -> _Kernel:
        """With ``values`` as operands between others; what gives them is taken in with ``taken``, if nothing else takes
        it."""
        fused = {v for v in values if v in self.inside and v not in self.shared}
        found = [o for v in values for o in (self.inside[v] if v in fused else (v,))]
        computed = self.taken | fused | (frozenset() if taken is None else {taken})
        operands = [v for v in dict.fromkeys((*before, *found, *behind)) if v not in computed]
        return _Kernel(self.room, self.inside, self.shared, operands, computed)
