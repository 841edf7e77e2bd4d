# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The tiles of kernels of attention, by kernel, width of heads, type of elements and architecture."""

from __future__ import annotations

from dataclasses import dataclass, replace

from retrograd.pipelines.devices.device_targets import CUDA_ARCHITECTURES

ATTEND, SUMS, KEYS, QUERIES = "attend", "delta", "key_gradients", "query_gradients"
"""The kernels, by the names of their functions."""

NARROWEST = 16
_LARGEST, _MOST_STAGES = 128, 4


@dataclass(frozen=True)
class AttentionTile:
    """A tile of ``rows`` of queries by ``columns`` of keys for a number of warps, which load ``stages`` steps ahead."""

    rows: int
    columns: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns} {self.warps} warps {self.stages} stages"


# Tiles by the width that a head is filled up to: an entry is for all up to it that no entry before it is for.
_Tiles = dict[str, dict[int, AttentionTile]]
_SUMS_TILE = AttentionTile(64, 1, 4, 1)
# The fastest of some ten each on an H100, of 2 x 8 x 2048 to 8 x 12 x 4096 rows; of the gradients of keys in f32 128
# wide the second, which takes 1.03 of the time, and has registers left for a mask.
_HOPPER: dict[str, _Tiles] = {
    "16 bits": {
        ATTEND: {64: AttentionTile(64, 64, 4, 3), 128: AttentionTile(64, 64, 4, 3), 256: AttentionTile(128, 64, 8, 2)},
        KEYS: {64: AttentionTile(64, 64, 4, 3), 128: AttentionTile(64, 128, 8, 3), 256: AttentionTile(64, 64, 8, 2)},
        QUERIES: {64: AttentionTile(64, 64, 4, 3), 128: AttentionTile(64, 64, 4, 2), 256: AttentionTile(128, 32, 8, 2)},
    },
    "f32": {
        ATTEND: {64: AttentionTile(64, 64, 4, 1), 128: AttentionTile(128, 32, 8, 1)},
        KEYS: {64: AttentionTile(64, 32, 4, 1), 128: AttentionTile(32, 32, 4, 1)},
        QUERIES: {64: AttentionTile(64, 64, 4, 1), 128: AttentionTile(32, 32, 4, 1)},
    },
}
# By shared memory, of which a workgroup has 99 KiB on the smallest, and by registers; none was measured.
_OTHERS: dict[str, _Tiles] = {
    "16 bits": {
        ATTEND: {64: AttentionTile(128, 64, 4, 2), 128: AttentionTile(64, 64, 4, 2), 256: AttentionTile(32, 32, 4, 2)},
        KEYS: {64: AttentionTile(64, 64, 4, 2), 128: AttentionTile(32, 64, 8, 2), 256: AttentionTile(32, 32, 8, 1)},
        QUERIES: {64: AttentionTile(64, 64, 4, 2), 128: AttentionTile(64, 32, 8, 2), 256: AttentionTile(32, 32, 8, 1)},
    },
    "f32": {
        ATTEND: {64: AttentionTile(64, 32, 4, 2), 128: AttentionTile(32, 32, 4, 1)},
        KEYS: {64: AttentionTile(32, 64, 8, 1), 128: AttentionTile(16, 32, 4, 1)},
        QUERIES: {64: AttentionTile(64, 32, 8, 1), 128: AttentionTile(32, 16, 4, 1)},
    },
}


def fill_width(width: int) -> int:
    """The power of two that a head of this width is filled up to with zeros."""
    return max(NARROWEST, 1 << (width - 1).bit_length())


def choose_tile(kind: str, element: str, width: int, architecture: str) -> AttentionTile:
    """The tile of a kernel."""
    if kind == SUMS:
        return _SUMS_TILE
    tiles = (_HOPPER if architecture == "sm_90" else _OTHERS)["f32" if element == "f32" else "16 bits"][kind]
    return next(tile for widest, tile in tiles.items() if fill_width(width) <= widest)


def list_tiles(kind: str, element: str, width: int, architecture: str, most: int) -> tuple[AttentionTile, ...]:
    """List at most ``most`` tiles that a device may find the fastest: first the one that is taken unasked, then what is
    like it but for half or twice the rows or columns, the warps, or the steps ahead."""
    first = choose_tile(kind, element, width, architecture)
    if kind == SUMS:
        return (first,)
    more = 8 if first.warps == 4 else 4
    taller, wider = replace(first, rows=2 * first.rows), replace(first, columns=2 * first.columns)
    lower, narrower = replace(first, rows=first.rows // 2), replace(first, columns=first.columns // 2)
    near = [
        replace(first, stages=first.stages + 1),
        replace(first, stages=first.stages - 1),
        replace(taller, warps=8),
        replace(wider, warps=8),
        replace(first, warps=more),
        lower,
        narrower,
        taller,
        wider,
        replace(lower, columns=wider.columns),
        replace(taller, columns=narrower.columns),
        replace(lower, warps=4),
    ]
    size = fill_width(width) * (4 if element == "f32" else 2)
    most_bytes = CUDA_ARCHITECTURES[architecture].shared_memory
    found = [tile for tile in near if _is_possible(tile) and count_shared(kind, tile, size) <= most_bytes]
    return tuple(dict.fromkeys([first, *found]))[:most]


def _is_possible(tile: AttentionTile) -> bool:
    sizes = (tile.rows, tile.columns)
    return min(sizes) >= NARROWEST and max(sizes) <= _LARGEST and 1 <= tile.stages <= _MOST_STAGES


def count_shared(kind: str, tile: AttentionTile, size: int) -> int:
    """The least bytes of shared memory that a kernel takes, whose heads are of so many bytes a row: what stays, and two
    tensors of what is gone over for each step ahead. Those of f32 take up to half as much again."""
    stays, goes = (2 * tile.columns, tile.rows) if kind == KEYS else (tile.rows, tile.columns)
    return size * ((2 if kind == QUERIES else 1) * stays + 2 * tile.stages * goes)
