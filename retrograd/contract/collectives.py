# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Collectives that a graph has as ops: what all processes of a group do together, of ``bwd.collective`` and of a step
of a plan; and how they may be joined and moved."""

from __future__ import annotations

from dataclasses import dataclass

from retrograd.contract.errors import RetrogradError

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)

REDUCTIONS = (ALL_REDUCE, REDUCE_SCATTER)
"""Those that add up, or take the mean, of what each process has."""

BUCKET_BYTES, FIRST_BUCKET_BYTES, PREFETCH_BYTES = 25 << 20, 1 << 20, 64 << 20
"""As ``DistributedDataParallel`` has its buckets, and what two blocks of some hundred million parameters gather."""


@dataclass(frozen=True)
class Collective:
    """An exchange between processes: one of ``COLLECTIVES``, how they reduce (``sum``, ``avg``, ...; empty for a
    gathering), of how many processes the group is (0 where that does not matter), and the group's name."""

    collective: str
    reduction: str
    size: int
    group: str


class CollectivesError(RetrogradError, ValueError):
    """Bytes that are none."""


@dataclass(frozen=True)
class Collectives:
    """How the collectives of a compiled graph may be joined and moved.

    Reductions of one kind are joined into buckets of at most ``bucket_bytes`` bytes, the first of each kind of
    ``first_bucket_bytes``, if that is less; 0 joins none. A gathering starts one stage earlier, as long as what is
    gathered early takes at most ``prefetch_bytes`` bytes at any time; 0 moves none.

    All processes then have to run the same compiled code: one that runs eagerly starts others, in another order.

    Raises:
        CollectivesError: a number of bytes is no int, or negative.
    """

    bucket_bytes: int = BUCKET_BYTES
    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    prefetch_bytes: int = PREFETCH_BYTES

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "first_bucket_bytes", "prefetch_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise CollectivesError(f"{name} is a number of bytes, 0 or more, not {value!r}")
