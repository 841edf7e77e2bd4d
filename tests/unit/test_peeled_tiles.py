# Part of the retrograd project, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tiles whose rest is a loop of its own: which products get one, of which width."""

import pytest

from retrograd.pipelines.analysis.layout.cpu_tiles import PeeledTile, find_peeled_tile

WIDE, NARROW = PeeledTile(8, 32, 4), PeeledTile(8, 16, 8)


@pytest.mark.parametrize(
    ("columns", "tile"), [(32, WIDE), (33, WIDE), (47, WIDE), (48, NARROW), (49, NARROW), (64, WIDE), (401, WIDE)]
)
def test_the_narrow_tile_is_for_few_columns_of_which_the_wide_one_leaves_many(columns: int, tile: PeeledTile) -> None:
    assert find_peeled_tile(401, columns, 64) == tile


@pytest.mark.parametrize(("rows", "columns", "terms"), [(7, 401, 64), (401, 15, 64), (401, 401, 3), (401, 17, 7)])
def test_sides_shorter_than_a_tile_have_none(rows: int, columns: int, terms: int) -> None:
    assert find_peeled_tile(rows, columns, terms) is None
