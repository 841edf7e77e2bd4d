# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""How convolutions are divided: tiles of the product that one is, and parts of a filter gradient's long sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from retrograd.pipelines.kernels.tiles import MULTIPROCESSORS

CONVOLVE, SPREAD, CORRELATE = "convolve", "spread", "correlate"
"""The kernels, by the names of their functions: results, gradients of images, gradients of filters."""

MOST_PARTS = 256


@dataclass(frozen=True)
class Work:
    """The product that a convolution is: ``count`` of them, each of ``rows`` x ``columns`` sums over ``taps`` times
    ``depth`` terms. Of a filter gradient each tap has columns of its own instead, which ``count`` counts."""

    kind: str
    count: int
    rows: int
    columns: int
    taps: int
    depth: int
    element: str


@dataclass(frozen=True)
class ConvolutionTile:
    """A tile of ``rows`` by ``columns``, in steps of ``depth`` terms, for a number of warps, which load ``stages``
    steps ahead; a sum is computed in ``parts``. ``rate`` is what tiles of this kind reach, in TFLOP/s, where there are
    enough of them, and ``resident`` how many a multiprocessor holds."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    rate: float
    resident: int = 1
    parts: int = 1

    def __str__(self) -> str:
        sizes = f"{self.rows}x{self.columns}x{self.depth} {self.warps} warps {self.stages} stages"
        return sizes + f" {self.parts} parts" * (self.parts > 1)

    def count(self, work: Work) -> int:
        """Tiles of all products."""
        return work.count * -(-work.rows // self.rows) * -(-work.columns // self.columns)

    def steps(self, work: Work) -> int:
        """Steps of a part; the last part may have fewer."""
        return -(-work.taps * -(-work.depth // self.depth) // self.parts)


_Tiles = dict[str, dict[str, tuple[ConvolutionTile, ...]]]
# What the parts of a sum are written and added up with, in bytes a second.
_BANDWIDTH = 2.0e12
_FEWEST_STEPS = 4
# How much longer a tile takes by itself than its share of a full multiprocessor, for each other one that fits.
_ALONE = 0.3
_MOST_OF_A_KIND = 2

# Of those for an H100 the widest two of convolutions were measured, at the sizes of ResNet-50.
_HOPPER: _Tiles = {
    "16 bits": {
        CONVOLVE: (
            ConvolutionTile(128, 256, 64, 8, 3, 480),
            ConvolutionTile(128, 128, 64, 8, 3, 420),
            ConvolutionTile(128, 64, 64, 4, 3, 320, 2),
            ConvolutionTile(64, 256, 64, 4, 3, 380),
            ConvolutionTile(64, 64, 64, 4, 3, 250, 3),
        ),
        CORRELATE: (ConvolutionTile(128, 128, 64, 8, 3, 350), ConvolutionTile(64, 64, 64, 4, 3, 250, 3)),
    },
    "f32": {
        CONVOLVE: (ConvolutionTile(128, 128, 32, 8, 2, 60), ConvolutionTile(64, 64, 32, 4, 2, 45, 3)),
        CORRELATE: (ConvolutionTile(128, 128, 32, 8, 2, 50), ConvolutionTile(64, 64, 32, 4, 2, 45, 3)),
    },
}
# By shared memory, of which a workgroup has 99 KiB on the smallest, and by registers; none was measured.
_OTHERS: _Tiles = {
    "16 bits": {
        CONVOLVE: (ConvolutionTile(128, 128, 32, 8, 3, 140), ConvolutionTile(64, 64, 32, 4, 3, 90, 3)),
        CORRELATE: (ConvolutionTile(128, 128, 32, 8, 3, 120), ConvolutionTile(64, 64, 32, 4, 3, 80, 3)),
    },
    "f32": {
        CONVOLVE: (ConvolutionTile(64, 64, 32, 4, 2, 25, 2), ConvolutionTile(64, 32, 32, 4, 2, 18, 3)),
        CORRELATE: (ConvolutionTile(64, 64, 32, 4, 2, 20, 2), ConvolutionTile(64, 32, 32, 4, 2, 15, 3)),
    },
}


def choose_tile(work: Work, architecture: str) -> ConvolutionTile:
    """The tile that is expected to take the least time."""
    return list_tiles(work, architecture, 1)[0]


def list_tiles(work: Work, architecture: str, most: int) -> tuple[ConvolutionTile, ...]:
    """The tiles that are expected to take the least time, those first: of each kind with two numbers of parts."""
    found: dict[ConvolutionTile, int] = {}
    listed = []
    for tile in sorted(_find_tiles(work, architecture), key=lambda tile: estimate_seconds(work, tile, architecture)):
        kind = replace(tile, parts=1)
        found[kind] = found.get(kind, 0) + 1
        if found[kind] <= _MOST_OF_A_KIND:
            listed.append(tile)
    return tuple(listed[:most])


def _find_tiles(work: Work, architecture: str) -> Iterator[ConvolutionTile]:
    tiles = (_HOPPER if architecture == "sm_90" else _OTHERS)["f32" if work.element == "f32" else "16 bits"]
    for tile in tiles[CORRELATE if work.kind == CORRELATE else CONVOLVE]:
        yield tile
        steps = tile.steps(work)
        for parts in range(2, min(MOST_PARTS, steps // _FEWEST_STEPS) + 1 if work.kind == CORRELATE else 0):
            divided = replace(tile, parts=parts)
            # No part is without steps.
            if divided.steps(work) * (parts - 1) < steps:
                yield divided


def estimate_seconds(work: Work, tile: ConvolutionTile, architecture: str) -> float:
    """How long it takes: rounds of tiles, and what writes and adds up the parts of sums."""
    processors, count = MULTIPROCESSORS[architecture], tile.count(work) * tile.parts
    whole, rest = divmod(count, processors * tile.resident)
    # In the last round a multiprocessor may hold fewer; one by itself leaves it idle at times.
    last = max(-(-rest // processors), 1 + _ALONE * (tile.resident - 1)) if rest else 0
    own = 2 * tile.rows * tile.columns * tile.depth * tile.steps(work) * processors / (tile.rate * 1e12)
    results = work.count * work.rows * work.columns
    return (whole * tile.resident + last) * own + (8 * tile.parts * results / _BANDWIDTH if tile.parts > 1 else 0.0)
