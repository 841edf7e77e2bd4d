# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How products are divided: tiles of a workgroup, and parts of the sum where there are few tiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """``batch`` products of m x k by k x n matrices of ``element`` (MLIR's name)."""

    batch: int
    m: int
    n: int
    k: int
    element: str

    @property
    def parts(self) -> int:
        """How many matrices of bf16 one of f32 is the sum of; one of 16 bits is multiplied as it is."""
        return 3 if self.element == "f32" else 1


@dataclass(frozen=True)
class Tiling:
    """A workgroup's tile (m x n, in steps of k), its warps, how many steps ahead it loads, and how many ``parts`` the
    sum is computed in. ``copied`` tiles are fetched by the copy engine, ``specialized`` ones by warps that do nothing
    else. ``rate`` is what tiles of this kind reach, in TFLOP/s, where there are enough of them, and ``resident`` how
    many a multiprocessor holds."""

    architecture: str
    m: int
    n: int
    k: int
    warps: int
    stages: int
    rate: float
    resident: int = 1
    copied: bool = False
    parts: int = 1
    specialized: bool = False

    def __str__(self) -> str:
        sizes = f"{self.m}x{self.n}x{self.k} {self.warps} warps {self.stages} stages"
        return sizes + f" {self.way}" * bool(self.way) + (f" {self.parts} parts" if self.parts > 1 else "")

    @property
    def way(self) -> str:
        """How tiles are fetched, where it is not by the threads that multiply them."""
        return "specialized" if self.specialized else "copied" if self.copied else ""

    @property
    def constants(self) -> dict[str, int]:
        """The constants of a kernel with this tile. A specialized one has two accumulators, of powers of two."""
        if not self.specialized:
            return {"BM": self.m, "BN": self.n, "BK": self.k}
        first = 1 << (self.n - 1).bit_length() - 1
        return {"BM": self.m, "N0": first, "N1": self.n - first, "BK": self.k, "STAGES": self.stages}

    def count(self, shape: Shape) -> int:
        """Tiles of one product."""
        return -(-shape.m // self.m) * -(-shape.n // self.n)

    def steps(self, shape: Shape) -> int:
        """Steps of a part; the last part may have fewer."""
        total = -(-shape.k // self.k) if self.copied else pad(shape.k) // self.k
        return -(-total // self.parts)


def _specialize(n: int, stages: int, rate: float) -> Tiling:
    """A tile of 128 rows for Hopper."""
    return Tiling("sm_90", 128, n, 64, 8, stages, rate, copied=True, specialized=True)


MULTIPROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132, "sm_120": 170}
"""Of the largest card of each architecture: A100, RTX 3090, RTX 4090, H100, RTX 5090."""

# Of an H100, less what a sum of parts does not reach of it: bytes in a second.
_BANDWIDTH = 2.5e12
_MOST_PARTS = 8
_MOST_DIVISIONS = 2
# A part has so many steps at the least.
_FEWEST_STEPS = 8
_SMALL, _LARGE = 64, 128


def pad(size: int) -> int:
    """Round a size up to one that tiles divide."""
    step = _SMALL if size <= _SMALL else _LARGE
    return -(-size // step) * step


# Measured on an H100, at 4096 x 4096 x 4096 and 4096 x 3072 x 768; those of other architectures are by shared memory.
_TILES: dict[str, dict[int, tuple[Tiling, ...]]] = {
    "sm_90": {
        3: (
            Tiling("sm_90", 64, 128, 32, 4, 3, rate=110, resident=2),
            Tiling("sm_90", 64, 64, 64, 4, 2, rate=80, resident=2),
        ),
        1: (
            _specialize(256, 4, rate=790),
            _specialize(192, 4, rate=790),
            _specialize(160, 5, rate=750),
            Tiling("sm_90", 128, 256, 64, 8, 3, rate=750, copied=True),
            Tiling("sm_90", 128, 128, 64, 8, 4, rate=640, copied=True),
            Tiling("sm_90", 128, 128, 64, 4, 4, rate=560),
            Tiling("sm_90", 128, 64, 64, 4, 4, rate=400, resident=2),
            Tiling("sm_90", 64, 64, 64, 4, 3, rate=300, resident=4),
        ),
    },
    "sm_80": {
        3: (Tiling("sm_80", 64, 128, 32, 4, 3, rate=35), Tiling("sm_80", 64, 64, 32, 4, 3, rate=25, resident=2)),
        1: (Tiling("sm_80", 128, 128, 64, 8, 3, rate=220), Tiling("sm_80", 64, 64, 64, 4, 3, rate=130, resident=3)),
    },
}
# With 99 KiB of shared memory for a workgroup.
_TIGHT = {
    3: (Tiling("", 64, 128, 32, 4, 2, rate=25), Tiling("", 64, 64, 32, 4, 2, rate=20, resident=2)),
    1: (Tiling("", 128, 128, 32, 8, 3, rate=140), Tiling("", 64, 64, 64, 4, 3, rate=90, resident=2)),
}
for _name in ("sm_86", "sm_89", "sm_120"):
    _TILES[_name] = {
        parts: tuple(replace(tiling, architecture=_name) for tiling in tilings) for parts, tilings in _TIGHT.items()
    }

ARCHITECTURES = tuple(sorted(_TILES, key=lambda name: int(name[3:])))
"""Those that there are tiles for."""


# Not unasked, but where a device can tell: of each the rate is supposed.
_TRIED: dict[str, dict[int, tuple[Tiling, ...]]] = {
    "sm_90": {
        3: (
            Tiling("sm_90", 128, 128, 32, 8, 3, rate=105),
            Tiling("sm_90", 64, 256, 32, 8, 3, rate=105),
            Tiling("sm_90", 128, 64, 32, 4, 3, rate=100, resident=2),
            Tiling("sm_90", 64, 128, 32, 4, 2, rate=100, resident=2),
            Tiling("sm_90", 64, 128, 64, 4, 2, rate=100),
            Tiling("sm_90", 64, 64, 32, 4, 3, rate=80, resident=3),
        ),
        1: (
            _specialize(128, 6, rate=640),
            Tiling("sm_90", 256, 128, 64, 8, 3, rate=700, copied=True),
            Tiling("sm_90", 128, 256, 64, 8, 4, rate=720, copied=True),
            Tiling("sm_90", 128, 128, 64, 4, 4, rate=620, copied=True),
            Tiling("sm_90", 128, 128, 64, 4, 3, rate=640, resident=2, copied=True),
            Tiling("sm_90", 64, 256, 64, 4, 4, rate=600, copied=True),
            Tiling("sm_90", 128, 64, 64, 4, 4, rate=540, resident=2, copied=True),
            Tiling("sm_90", 64, 128, 64, 4, 4, rate=540, resident=2, copied=True),
            Tiling("sm_90", 128, 256, 64, 8, 3, rate=600),
            Tiling("sm_90", 64, 128, 64, 4, 4, rate=400, resident=2),
        ),
    },
    "sm_80": {
        3: (Tiling("sm_80", 128, 64, 32, 4, 3, rate=35), Tiling("sm_80", 128, 128, 32, 8, 2, rate=35)),
        1: (
            Tiling("sm_80", 128, 256, 32, 8, 3, rate=220),
            Tiling("sm_80", 128, 128, 32, 4, 4, rate=210),
            Tiling("sm_80", 128, 64, 64, 4, 3, rate=180, resident=2),
            Tiling("sm_80", 64, 128, 64, 4, 3, rate=180, resident=2),
        ),
    },
}
for _name in ("sm_86", "sm_89", "sm_120"):
    _TRIED[_name] = {
        3: (Tiling(_name, 128, 64, 32, 4, 2, rate=25), Tiling(_name, 64, 128, 32, 8, 2, rate=25)),
        1: (
            Tiling(_name, 128, 64, 64, 4, 2, rate=120),
            Tiling(_name, 64, 128, 64, 4, 2, rate=120),
            Tiling(_name, 128, 128, 32, 4, 3, rate=130),
        ),
    }


def choose_tiling(shape: Shape, architecture: str) -> Tiling:
    """The tiling that is expected to take the least time, of those that were measured.

    Raises:
        KeyError: an architecture that is none of ``ARCHITECTURES``.
    """
    found = _divide(_TILES[architecture][shape.parts], shape)
    return min(found, key=lambda tiling: estimate_seconds(shape, tiling))


def list_tilings(shape: Shape, architecture: str, most: int) -> tuple[Tiling, ...]:
    """List at most ``most`` tilings that a device may find the fastest: the one that is taken unasked first, then those
    that are expected to take the least time, each in at most two numbers of parts.

    Raises:
        KeyError: an architecture that is none of ``ARCHITECTURES``.
    """
    first = choose_tiling(shape, architecture)
    kinds = (*_TILES[architecture][shape.parts], *_TRIED[architecture][shape.parts])
    found = sorted(_divide(kinds, shape), key=lambda tiling: estimate_seconds(shape, tiling))
    listed, counts = [first], Counter([replace(first, parts=1)])
    for tiling in found:
        kind = replace(tiling, parts=1)
        if tiling != first and counts[kind] < _MOST_DIVISIONS:
            listed.append(tiling)
            counts[kind] += 1
    return tuple(listed[:most])


def _divide(kinds: Sequence[Tiling], shape: Shape) -> Iterator[Tiling]:
    """Those of some tilings that a product can have, in all numbers of parts that it can."""
    for tiling in kinds:
        if tiling.copied and shape.batch > 1:
            continue
        if not tiling.copied and (pad(shape.m) % tiling.m or pad(shape.n) % tiling.n):
            continue
        yield tiling
        steps = tiling.steps(shape)
        most = min(_MOST_PARTS, steps // _FEWEST_STEPS) if shape.batch == 1 else 1
        for parts in range(2, most + 1):
            divided = replace(tiling, parts=parts)
            # No part is without steps.
            if divided.steps(shape) * (parts - 1) < steps:
                yield divided


def estimate_seconds(shape: Shape, tiling: Tiling) -> float:
    """How long a product takes: whole rounds of tiles, and what writes and adds up its parts."""
    slots = MULTIPROCESSORS[tiling.architecture] * tiling.resident
    rounds = -(-tiling.count(shape) * shape.batch * tiling.parts // slots)
    tile = 2 * tiling.m * tiling.n * tiling.k * tiling.steps(shape) * slots / (tiling.rate * 1e12)
    sums = 0.0 if tiling.parts == 1 else 8 * (tiling.parts + 1) * shape.m * shape.n / _BANDWIDTH
    return rounds * tile + sums
