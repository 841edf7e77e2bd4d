# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Sums down columns in kernels of our own, without a device: which tiles they have."""

import pytest

from retrograd.pipelines.kernels.column_text import choose_tiles


@pytest.mark.parametrize(
    ("rows", "columns"), [(802_816, 64), (3136, 2048), (4100, 65), (256, 1024), (16_384, 16), (70_001, 48)]
)
def test_parts_cover_all_rows_once(rows: int, columns: int) -> None:
    tiles = choose_tiles(rows, columns)
    assert (tiles.parts - 1) * tiles.span < rows <= tiles.parts * tiles.span
    assert tiles.span % tiles.rows == 0
    # Triton's blocks are powers of two.
    assert tiles.rows.bit_count() == tiles.columns.bit_count() == 1


def test_few_columns_are_divided_among_as_many_workgroups_as_many_are() -> None:
    narrow, wide = choose_tiles(802_816, 64), choose_tiles(50_176, 1024)
    assert narrow.parts > 7 * wide.parts
    assert narrow.parts >= 132 and wide.parts * (1024 // wide.columns) >= 132
